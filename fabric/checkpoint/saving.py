# SPDX-License-Identifier: Apache-2.0
"""From the user's objects to a file or folder."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fabric.checkpoint.access import Attempts, Ranks, StateAccess
from fabric.checkpoint.background import Busy, SaveHandle, Write, finished
from fabric.checkpoint.checksum import write_marked_file
from fabric.checkpoint.copies import Copies
from fabric.checkpoint.folder.folders import replacing_folder, save_folder
from fabric.checkpoint.layouts import Format, layout_of, validated
from fabric.checkpoint.state.flatten import Path, flatten
from fabric.checkpoint.state.gather import gathered, hash_of, places_of_shards, unlike_shards, with_ties
from fabric.checkpoint.state.naming import all_by_name, names_in, parts_in, with_names
from fabric.checkpoint.state.plain import validate_loadable
from fabric.checkpoint.state.shards import is_sharded
from fabric.checkpoint.state.tree import is_stateful
from fabric.checkpoint.state.union import merged_groups, places_beside, united, unlike_beside
from fabric.checkpoint.weights.saving import plan_weights, save_weights
from fabric.plugins.io import CheckpointIO
from fabric.utilities.parameter_names import rebuilt, with_plain_names
from fabric.utilities.spelling import suggest
from fabric.utilities.types import PathLike

T = TypeVar("T")
Filter = Mapping[str, Callable[[str, Any], bool]]


def save(
    path: PathLike,
    state: Mapping[str, Any],
    *,
    access: StateAccess,
    io: CheckpointIO,
    filter: Filter | None = None,
    format: Format | None = None,
    max_shard_size: int | str | None = None,
    blocking: bool = True,
    busy: Busy = "wait",
    checksum: bool = False,
) -> SaveHandle:
    """Write `state` as one file, or as a folder where the strategy says so (`state_dict_type`), or `format`.

    Call it on every rank: rank 0 writes a file, all ranks a folder, and an error anywhere is raised everywhere. A
    checkpoint that is at the path already is replaced when the new one is complete.

    Args:
        path: Where to; rank 0's counts.
        state: Modules, optimizers, other objects with `state_dict` and `load_state_dict`, and plain values, nested
            in dictionaries and lists as they come. Of plain values rank 0's are written.
        access: The strategy.
        io: Writes the file.
        filter: For a key of `state`, a function of (name, value) that says which entries of its state to keep.
        format: `torch` for one file, `sharded` for a folder to which each rank writes its part, `safetensors` for
            weights as Hugging Face writes them, with the rest beside them. By default what the strategy says, and
            `safetensors` for a path that ends so.
        max_shard_size: The most bytes of one file of weights with `safetensors`, such as `"5GB"`.
        blocking: False copies `state` and lets a thread write the copy.
        busy: What to do where a save is still going on: `wait` for it, or `raise`.
        checksum: Whether loading shall check that no bit has flipped.

    Returns:
        A handle that says when the checkpoint is complete; with `blocking` it is.

    Raises:
        RuntimeError: If a save is still going on, with `busy="raise"`.
        TypeError: If `state` holds something that `load` would refuse by default.
        ValueError: If ranks save different sharded tensors.
        OSError: If the file can't be written; the old one is untouched.
    """
    access.saves.settle(access, busy)
    attempts = Attempts()
    layout: Format | None = None
    with attempts:
        _validate_filter(filter, state)
        asked = layout_of(path, format, max_shard_size, access, io)
        layout = validated(asked, io, busy=busy, checksum=checksum)
    content, places = _content_of(state, access, attempts, filter)
    layout = _agreed(layout, places, access, attempts)
    copies = None if blocking else access.saves.copies()
    write: Write
    if layout == "safetensors":
        target = access.broadcast(path)
        plan = plan_weights(target, content, state, access, attempts, max_shard_size, copies)
        write = partial(save_weights, target, plan, checksum)
    elif layout == "sharded":
        flat = _flat(content, state, access, attempts)
        target = access.broadcast(path)
        write = partial(_save_folder, target, _copied(flat, copies, attempts), checksum)
    else:
        whole = _whole(content, state, access, attempts, copies, gather=bool(places))
        write = partial(_save_file, path, _copied(whole, copies, attempts), io, checksum)
    if copies is not None:
        return access.saves.start(path, write, access, attempts)
    write(access, attempts)
    return finished(path)


def _content_of(
    state: Mapping[str, Any], access: StateAccess, attempts: Attempts, filter: Filter | None
) -> tuple[Any, list[str]]:
    """What is to be saved, and the places of tensors that have to be the same on all ranks."""
    content = _collect(state, state, access, attempts)
    places: list[str] = []
    with attempts:
        content = _filtered(content, filter or {})
        if access.is_global_zero or access.state_is_distributed:
            validate_loadable(content, "state")
        places = _compared(content, state, access)
    return content, places


def _compared(content: Any, state: Any, access: StateAccess) -> list[str]:
    """The places of tensors that have to be the same on all ranks."""
    if access.state_is_distributed:
        return sorted(places_beside(content, state))
    return list(places_of_shards(content, "state"))


def _agreed(layout: Format | None, places: list[str], access: StateAccess, attempts: Attempts) -> Format | None:
    """Rank 0's layout, after all have agreed on which shards they save."""
    notes = [note for note in attempts.agree(access, (hash_of(places), layout)) if note is not None]
    if len({hashed for hashed, _ in notes}) > 1:
        unlike = unlike_beside if access.state_is_distributed else unlike_shards
        raise unlike(access.gather_objects(places))
    return notes[0][1]


def _copied(content: T, copies: Copies | None, attempts: Attempts) -> T:
    """What is written: the loop goes on to change the content itself."""
    if copies is not None and attempts.error is None:
        with attempts:
            return copies.of(content)
    return content


def _whole(
    content: Any, state: Any, access: StateAccess, attempts: Attempts, copies: Copies | None, gather: bool
) -> Any:
    """What rank 0 writes to a file; None on the others."""
    if access.state_is_distributed:
        content = united(content, state, access, attempts)
    elif gather:
        content = gathered(content, access, attempts, Tensor.cpu if copies is None else copies.of_gathered)
        attempts.agree(access)
    return content if access.is_global_zero else None


def _save_file(
    path: PathLike, content: Any, io: CheckpointIO, checksum: bool, ranks: Ranks, attempts: Attempts
) -> None:
    with attempts:
        if ranks.is_global_zero:
            with replacing_folder(path, io) as target:
                write_marked_file(content, target) if checksum else io.save_checkpoint(content, target)
    attempts.agree(ranks)


def _save_folder(path: PathLike, flat: Mapping[Path, Any], checksum: bool, ranks: Ranks, attempts: Attempts) -> None:
    save_folder(path, flat, ranks, attempts, checksum)


def _flat(content: Any, state: Any, access: StateAccess, attempts: Attempts) -> dict[Path, Any]:
    """What this rank writes to a folder.

    Each rank writes its shards, and where ranks hold different parameters all of its own; rank 0 the rest.
    """
    flat: dict[Path, Any] = {}
    with attempts:
        flat = flatten(all_by_name(content, state), state)
        if not access.is_global_zero:
            flat = {place: value for place, value in flat.items() if is_sharded(value) or _is_own(place, state, access)}
    if access.state_is_distributed:
        flat |= merged_groups(content, state, access, attempts)
    held = [path for path, _ in parts_in(state) if any(place[:-1][: len(path)] == path for place in flat)]
    on_any = {path for paths in attempts.agree(access, held) for path in paths or ()}
    return {place: value for place, value in flat.items() if place not in on_any}  # nothing, where others have entries


def _is_own(place: Path, state: Any, access: StateAccess) -> bool:
    if not access.state_is_distributed or "param_groups" in place:
        return False
    return any(place[: len(part)] == part for part, _ in parts_in(state))


def _collect(value: Any, state: Any, access: StateAccess, attempts: Attempts) -> Any:
    """The states of the objects in `value`, in its own shape. Asks each object in turn, whatever happens."""
    if is_stateful(value):
        with attempts:
            return _state_of(value, state, access)
        return None
    if isinstance(value, Mapping):
        collected = {key: _collect(item, state, access, attempts) for key, item in value.items()}
        return type(value)(collected) if type(value) in (OrderedDict, Counter) else collected  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_collect(item, state, access, attempts) for item in value)
    return value


def _state_of(value: Any, state: Any, access: StateAccess) -> Any:
    if isinstance(value, Module):
        return with_ties(with_plain_names(access.get_module_state_dict(value)), value)
    if isinstance(value, Optimizer):
        names = names_in(state, value, access)
        if names is None and access.state_is_distributed:
            raise ValueError(
                f"`fabric.save`: each rank holds other parameters of this `{type(value).__name__}`, and their names are"
                " not known. Put the module that they belong to into `state` too."
            )
        return with_names(access.get_optimizer_state(value), names)
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
