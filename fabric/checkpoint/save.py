# SPDX-License-Identifier: Apache-2.0
"""From the user's objects to a file."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from fabric.checkpoint.access import Attempts, StateAccess
from fabric.checkpoint.plain import validate_loadable
from fabric.checkpoint.tree import is_stateful
from fabric.plugins.io import CheckpointIO
from fabric.utilities.parameter_names import rebuilt, with_plain_names
from fabric.utilities.spelling import suggest
from fabric.utilities.types import PathLike

Filter = Mapping[str, Callable[[str, Any], bool]]


def save(
    path: PathLike,
    state: Mapping[str, Any],
    *,
    access: StateAccess,
    io: CheckpointIO,
    filter: Filter | None = None,
) -> None:
    """Write `state` as one file. Call it on every rank: rank 0 writes, and an error anywhere is raised everywhere.

    Args:
        path: Where to; rank 0's counts.
        state: Modules, optimizers, other objects with `state_dict` and `load_state_dict`, and plain values, nested
            in dictionaries and lists as they come.
        access: The strategy.
        io: Writes the file.
        filter: For a key of `state`, a function of (name, value) that says which entries of its state to keep.

    Raises:
        TypeError: If `state` holds something that `load` would refuse by default.
        OSError: If the file can't be written; the old one is untouched.
    """
    attempts = Attempts()
    with attempts:
        _validate_filter(filter, state)
    content = _collect(state, access, attempts)
    with attempts:
        content = _filtered(content, filter or {})
        if access.is_global_zero:
            validate_loadable(content, "state")
    attempts.agree(access)
    with attempts:
        if access.is_global_zero:
            io.save_checkpoint(content, path)
    attempts.agree(access)


def _collect(value: Any, access: StateAccess, attempts: Attempts) -> Any:
    """The states of the objects in `value`, in its own shape. Asks each object in turn, whatever happens."""
    if is_stateful(value):
        with attempts:
            return _state_of(value, access)
        return None
    if isinstance(value, Mapping):
        collected = {key: _collect(item, access, attempts) for key, item in value.items()}
        return type(value)(collected) if type(value) in (OrderedDict, Counter) else collected  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_collect(item, access, attempts) for item in value)
    return value


def _state_of(value: Any, access: StateAccess) -> Any:
    if isinstance(value, Module):
        return with_plain_names(access.get_module_state_dict(value))
    if isinstance(value, Optimizer):
        return access.get_optimizer_state(value)
    return value.state_dict()


def _validate_filter(filter: Any, state: Mapping[str, Any]) -> None:
    if filter is None:
        return
    if not isinstance(filter, Mapping):
        raise TypeError(
            f"`fabric.save(..., filter={filter!r})` takes a dictionary from keys of `state` to functions."
            " Write `filter={'model': lambda name, value: ...}`."
        )
    for key, keep in filter.items():
        if key not in state:
            raise ValueError(
                f"`fabric.save(..., filter=...)`: `state` has no key {key!r}. {suggest(key, map(str, state))}"
            )
        if not callable(keep):
            raise TypeError(
                f"`fabric.save(..., filter={{{key!r}: {keep!r}}})` takes a function of (name, value) for each key."
                f" Write `filter={{{key!r}: lambda name, value: ...}}`."
            )


def _filtered(content: dict[str, Any], filter: Filter) -> dict[str, Any]:
    result = dict(content)
    for key, keep in filter.items():
        if not isinstance(content[key], Mapping):
            raise TypeError(
                f"`fabric.save(..., filter=...)`: `state[{key!r}]` is a `{type(content[key]).__name__}`, which has no"
                " entries to choose from. Leave it out of `filter`."
            )
        kept = {name: value for name, value in content[key].items() if keep(name, value)}
        result[key] = rebuilt(content[key], kept)
    return result
