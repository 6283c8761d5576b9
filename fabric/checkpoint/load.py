# SPDX-License-Identifier: Apache-2.0
"""From a file back into the user's objects."""

import os
from collections.abc import MutableMapping
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from fabric.checkpoint.access import Attempts, StateAccess
from fabric.checkpoint.matching import Matching
from fabric.checkpoint.tree import is_stateful
from fabric.plugins.io import CheckpointIO
from fabric.utilities.types import PathLike


def load(
    path: PathLike,
    state: Any = None,
    *,
    access: StateAccess,
    io: CheckpointIO,
    strict: bool = True,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Restore `state` from a file. Call it on every rank; an error anywhere is raised everywhere.

    Modules, optimizers and other objects with `load_state_dict` are restored in place, in nested dictionaries and lists
    too; dictionaries and lists of plain values are updated in place; other plain values are replaced. Nothing is
    changed before keys and shapes were compared.

    Args:
        path: What was given to `save`; rank 0's counts.
        state: A dictionary as it was given to `save`, or parts of it; None restores nothing.
        access: The strategy.
        io: Reads the file.
        strict: Whether everything in `state`, and every entry of a module, must be in the file.
        weights_only: Whether to refuse pickled objects.

    Returns:
        What the file holds and `state` did not ask for.

    Raises:
        RuntimeError: If the file does not match `state`; the message lists all differences.
        OSError: If the file can't be read.
        ValueError: If it is no checkpoint, or damaged.
        pickle.UnpicklingError: If it holds what is refused.
    """
    if isinstance(state, Module | Optimizer):
        load_raw(path, state, access=access, io=io, strict=strict, weights_only=weights_only)
        return {}
    path = access.broadcast(path)
    attempts = Attempts()
    matching = Matching(access, strict=strict)
    remainder: dict[str, Any] = {}
    with attempts:
        content = _read_dict(path, io, weights_only)
        remainder = matching.match_dict({} if state is None else _validate_state(state), content, "state")
        matching.raise_differences(path)
    attempts.agree(access)
    _restore(matching, attempts, access)
    return remainder


def load_raw(
    path: PathLike,
    obj: Any,
    *,
    access: StateAccess,
    io: CheckpointIO,
    strict: bool = True,
    weights_only: bool = True,
) -> None:
    """Restore one object from a file that holds its state dictionary alone. Call it on every rank.

    Args:
        path: Where from; rank 0's counts.
        obj: A module, an optimizer, or another object with `load_state_dict`.
        access: The strategy.
        io: Reads the file.
        strict: Whether the names must be the same.
        weights_only: Whether to refuse pickled objects.

    Raises:
        RuntimeError: If the file does not match; the message lists all differences.
    """
    path = access.broadcast(path)
    attempts = Attempts()
    matching = Matching(access, strict=strict)
    with attempts:
        if not is_stateful(obj):
            raise TypeError(
                f"`fabric.load_raw(path, obj)` takes a module or an optimizer, but got `{type(obj).__name__}`."
                " For a dictionary of several objects call `fabric.load(path, state)`."
            )
        matching.match_stateful(obj, _read_dict(path, io, weights_only), "obj")
        matching.raise_differences(path)
    attempts.agree(access)
    _restore(matching, attempts, access)


def _read_dict(path: PathLike, io: CheckpointIO, weights_only: bool) -> dict[str, Any]:
    content = io.load_checkpoint(path, map_location="cpu", weights_only=weights_only)
    if not isinstance(content, dict):
        raise ValueError(
            f"`{os.fspath(path)}` holds a `{type(content).__name__}` and not a dictionary, so it is no checkpoint."
            " Read it with `torch.load`."
        )
    return content


def _validate_state(state: Any) -> MutableMapping[Any, Any]:
    if not isinstance(state, MutableMapping):
        raise TypeError(
            f"`fabric.load(path, state)` takes a dictionary of names and objects, but got `{type(state).__name__}`."
            " Write `fabric.load(path, {'model': model, 'optimizer': optimizer})`."
        )
    return state


def _restore(matching: Matching, attempts: Attempts, access: StateAccess) -> None:
    for action in matching.actions:
        with attempts:
            action()
    attempts.agree(access)
