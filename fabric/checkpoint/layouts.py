# SPDX-License-Identifier: Apache-2.0
"""The forms of a checkpoint, and how a call of `save` chooses one."""

import os
from typing import Literal, get_args

from fabric.checkpoint.access import StateAccess
from fabric.checkpoint.weights.places import SUFFIX
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.utilities.spelling import suggest
from fabric.utilities.types import PathLike

Format = Literal["torch", "sharded", "safetensors"]


def layout_of(
    path: PathLike, format: str | None, max_shard_size: int | str | None, access: StateAccess, io: CheckpointIO
) -> Format:
    """The form in which `save` writes.

    Args:
        path: Where to.
        format: What the user said; None leaves it to the path and the strategy.
        max_shard_size: What the user said about the size of files.
        access: The strategy.
        io: What writes files.

    Raises:
        ValueError: If that can't be.
    """
    if format is not None and format not in get_args(Format):
        raise ValueError(
            f"`fabric.save(..., format={format!r})` is not a known format. {suggest(format, get_args(Format))}"
        )
    own = isinstance(io, TorchCheckpointIO)
    if format == "safetensors" and not own:
        raise ValueError(
            f"`fabric.save(..., format='safetensors')`: files are written by `{type(io).__name__}` here, which has a"
            " format of its own. Leave out `format`, or the plugin."
        )
    layout: Format = "sharded" if access.state_dict_type == "sharded" else "torch"
    if own and os.fspath(path).endswith(SUFFIX):
        layout = "safetensors"
    if format is not None:
        layout = format  # type: ignore[assignment]
    if max_shard_size is not None and layout != "safetensors":
        raise ValueError(
            f"`fabric.save(..., max_shard_size={max_shard_size!r})` is for `format='safetensors'`. Leave it out, or"
            " write that too."
        )
    return layout


def validated(layout: Format, io: CheckpointIO, *, busy: str, checksum: bool) -> Format:
    """The form of a checkpoint, unless it does not go together with how it shall be written.

    Args:
        layout: The form.
        io: What writes files.
        busy: What the user said.
        checksum: What the user said.

    Raises:
        ValueError: If that can't be.
    """
    if busy not in ("wait", "raise"):
        raise ValueError(f"`fabric.save(..., busy={busy!r})` is unknown. {suggest(busy, ('wait', 'raise'))}")
    if checksum and layout == "torch" and not isinstance(io, TorchCheckpointIO):
        raise ValueError(
            f"`fabric.save(..., checksum=True)`: files are written by `{type(io).__name__}` here, which has a format of"
            " its own. Leave out `checksum`, or the plugin."
        )
    return layout
