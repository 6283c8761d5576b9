# SPDX-License-Identifier: Apache-2.0
"""The file that makes a folder a checkpoint, and what is said of a folder that is none."""

import os

from fabric.utilities.cloud_io import local_path, split_url
from fabric.utilities.types import PathLike

MARKER = ".metadata"  # `torch.distributed.checkpoint`'s own name for it


def is_folder(path: PathLike) -> bool:
    """Whether there is a folder at a path or URL."""
    local = local_path(path)
    if local is not None:
        return os.path.isdir(local)
    filesystem, inner = split_url(path)
    return bool(filesystem.isdir(inner))


def is_committed(path: PathLike) -> bool:
    """Whether a folder is a whole checkpoint."""
    local = local_path(path)
    if local is not None:
        return os.path.isfile(os.path.join(local, MARKER))
    filesystem, inner = split_url(path)
    return bool(filesystem.exists(f"{inner}/{MARKER}"))


def damaged(path: str, what: str) -> ValueError:
    """The error for a folder whose metadata makes no sense."""
    return ValueError(
        f"`{path}` can't be read as a checkpoint. Its `{MARKER}` is damaged, or was not written by `fabric.save` or"
        f" `torch.distributed.checkpoint` ({what})."
    )


def damaged_data(path: str, what: str) -> ValueError:
    """The error for a folder whose data are not what its metadata says."""
    return ValueError(f"`{path}` can't be read as a checkpoint. It is damaged or incomplete: {what}.")
