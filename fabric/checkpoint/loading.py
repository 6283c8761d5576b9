# SPDX-License-Identifier: Apache-2.0
"""From a file back into the user's objects."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from fabric.checkpoint.access import Attempts, StateAccess, add_note
from fabric.checkpoint.checksum import validate_sums
from fabric.checkpoint.locks import keeping
from fabric.checkpoint.restoring.matching import Action, Matching
from fabric.checkpoint.sources import Source, open_source
from fabric.checkpoint.state.naming import names_in, parts_in
from fabric.checkpoint.state.shards import holds_sharded, is_sharded
from fabric.checkpoint.state.tree import is_stateful
from fabric.checkpoint.weights.reading import for_module_in
from fabric.plugins.io import CheckpointIO
from fabric.utilities.parameter_names import plain_name
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
    """Restore `state` from a file or folder. Call it on every rank; an error anywhere is raised everywhere.

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
        What the file holds and `state` did not ask for. Of a folder these tensors are not read: they are on the device
        `meta`, with their shapes and dtypes; without a `state` everything is read.

    Raises:
        RuntimeError: If the file does not match `state`; the message lists all differences.
        OSError: If the file can't be read.
        ValueError: If it is no checkpoint, or damaged.
        pickle.UnpicklingError: If it holds what is refused.
    """
    if isinstance(state, Module | Optimizer):
        load_raw(path, state, access=access, io=io, strict=strict, weights_only=weights_only)
        return {}
    access.saves.settle(access)
    path = access.broadcast(path)
    attempts = Attempts()
    elsewhere = _names_of_all_ranks(state, attempts, access)
    remainder: dict[str, Any] = {}
    actions: list[Action] = []
    with keeping(path, access.is_global_zero):
        with attempts:
            source = _open(path, state, access, io, weights_only)
            matching = Matching(source, state, access, strict=strict, elsewhere=elsewhere)
            content = for_module_in(source.content, state) if source.is_weights else source.content
            remainder = matching.match_dict({} if state is None else _validate_state(state), content, "state")
            matching.raise_differences(path)
            source.validate({} if state is None else remainder, *_share(state, access))
            actions = matching.actions
            if state is None:
                remainder = source.fetch(remainder)
        attempts.agree(access)
        _restore(actions, attempts, access)
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
    access.saves.settle(access)
    path = access.broadcast(path)
    attempts = Attempts()
    elsewhere = _names_of_all_ranks(obj, attempts, access)
    actions: list[Action] = []
    with keeping(path, access.is_global_zero):
        with attempts:
            if not is_stateful(obj):
                raise TypeError(
                    f"`fabric.load_raw(path, obj)` takes a module or an optimizer, but got `{type(obj).__name__}`."
                    " For a dictionary of several objects call `fabric.load(path, state)`."
                )
            source = _open(path, obj, access, io, weights_only)
            matching = Matching(source, obj, access, strict=strict, elsewhere=elsewhere)
            matching.match_stateful(obj, _state_of_one(obj, source), "obj")
            matching.raise_differences(path)
            source.validate({}, *_share(obj, access))
            actions = matching.actions
        attempts.agree(access)
        _restore(actions, attempts, access)


def _open(path: PathLike, state: Any, access: StateAccess, io: CheckpointIO, weights_only: bool) -> Source:
    validate_sums(path, io, weights_only, *_share(state, access))
    return open_source(path, io, weights_only=weights_only, mapped=_needs_parts(state, access))


def _needs_parts(state: Any, access: StateAccess) -> bool:
    """Whether this rank needs a part of a file only, and so reads and checks a part only."""
    parts = [part for _, part in parts_in(state)]
    tensors = (t for part in parts for t in (part.parameters() if isinstance(part, Module) else _parameters(part)))
    return access.state_is_distributed or any(map(is_sharded, tensors)) or holds_sharded(state)


def _share(state: Any, access: StateAccess) -> tuple[int, int]:
    """Which share of the checks is this rank's, and of how many."""
    shares = access.world_size if _needs_parts(state, access) else 1
    return access.global_rank % shares, shares


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_of_one(obj: Any, source: Source) -> Any:
    """A checkpoint of several objects holds one for a module if the names of exactly one are the module's own."""
    if not isinstance(obj, Module):
        return source.content
    names = set(map(plain_name, obj.state_dict()))
    found = [value for value in source.content.values() if isinstance(value, Mapping) and value.keys() == names]
    return found[0] if len(found) == 1 else source.content


def _names_of_all_ranks(state: Any, attempts: Attempts, access: StateAccess) -> dict[int, frozenset[str]]:
    """Where ranks hold different parameters: the names that each module and optimizer has on all of them."""
    if not access.state_is_distributed:
        return {}
    parts = [part for _, part in parts_in(state)]
    own: list[list[str]] = []
    with attempts:
        own = [_names(part, state, access) for part in parts]
    of_ranks = [names or [] for names in attempts.agree(access, own)]
    return {id(part): frozenset().union(*names) for part, names in zip(parts, zip(*of_ranks, strict=True), strict=True)}


def _names(part: Module | Optimizer, state: Any, access: StateAccess) -> list[str]:
    if isinstance(part, Module):
        return list(access.get_module_state_dict(part))
    return [name for group in names_in(state, part, access) or () for name in group]


def _validate_state(state: Any) -> MutableMapping[Any, Any]:
    if not isinstance(state, MutableMapping):
        raise TypeError(
            f"`fabric.load(path, state)` takes a dictionary of names and objects, but got `{type(state).__name__}`."
            " Write `fabric.load(path, {'model': model, 'optimizer': optimizer})`."
        )
    return state


def _restore(actions: Sequence[Action], attempts: Attempts, access: StateAccess) -> None:
    """All of them, whatever happens, since other ranks may wait there; an error says what it left behind."""
    done = set()
    for where, action in actions:
        with attempts:
            action()
            done.add(where)
    failed = {where for where, _ in actions} - done
    everywhere = set().union(*access.gather_objects(failed))
    if attempts.error is not None:
        whole = [where for where, _ in actions if where not in everywhere]
        add_note(attempts.error, _remains(whole, [where for where, _ in actions if where in everywhere]))
    attempts.agree(access)


def _remains(whole: Sequence[str], parts: Sequence[str]) -> str:
    restored = f"Restored from it: {', '.join(dict.fromkeys(whole)) or 'nothing'}."
    return (
        f"{restored} Not, or only in part: {', '.join(dict.fromkeys(parts))}. Load a whole checkpoint into these"
        " objects before you go on."
    )
