# SPDX-License-Identifier: Apache-2.0
"""One content from ranks that hold different parameters, such as the stages of a pipeline."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.checkpoint.access import Attempts, StateAccess
from fabric.checkpoint.state.flatten import Path, flatten, unflatten
from fabric.checkpoint.state.later import as_bytes
from fabric.checkpoint.state.naming import all_by_name, by_number, parts_in
from fabric.checkpoint.state.shards import whole
from fabric.checkpoint.state.tree import at, is_stateful

Shape = tuple[tuple[int, ...], torch.dtype]


def united(content: Any, state: Any, access: StateAccess, attempts: Attempts) -> Any:
    """The content with the parameters of all ranks, on the CPU of rank 0. Collective; one tensor at a time.

    Args:
        content: This rank's.
        state: What it was taken from.
        access: The strategy.
        attempts: Where errors are kept.

    Returns:
        On rank 0 all of it; on the others what they had.
    """
    flat: dict[Path, Any] = {}
    groups: dict[Path, Any] = {}
    group = access.checkpoint_group  # all ranks make it together
    with attempts:
        flat, groups = _own_part(all_by_name(content, state), state)
    shapes = {path: _shape(value) if isinstance(value, Tensor) else None for path, value in flat.items()}
    plain = {path: value for path, value in flat.items() if not isinstance(value, Tensor)}
    versions = {path: getattr(_at(content, path), "_metadata", {}) for path, _ in parts_in(state)}
    notes = [note for note in attempts.agree(access, (shapes, plain, groups, versions)) if note is not None]
    entries: dict[Path, Any] = {}
    for path, (owner, shape) in _owners([note[0] for note in notes]).items():
        if shape is None:
            entries[path] = notes[owner][1][path]
            continue
        with attempts:
            entries[path] = _brought(flat.get(path), owner, shape, access, group)
    with attempts:
        if access.is_global_zero and attempts.error is None:
            content = _assembled(content, state, entries, notes, access)
    attempts.agree(access)
    return content


def _assembled(content: Any, state: Any, entries: Mapping[Path, Any], notes: Sequence[Any], access: StateAccess) -> Any:
    """The content with the entries and what all ranks noted, in PyTorch's own layouts."""
    groups = notes[0][2]
    merged = {path: _merged([note[2].get(path, []) for note in notes], access) for path in groups}
    parts = {}
    for path, part in parts_in(state):
        own = {place[len(path) :]: value for place, value in entries.items() if place[: len(path)] == path}
        if isinstance(part, Optimizer):
            parts[path] = by_number({"param_groups": merged[path], **unflatten(own)})
        else:
            parts[path] = _module_state(unflatten(own), [note[3].get(path, {}) for note in notes], access)
    return _replaced(content, (), parts)


def merged_groups(content: Any, state: Any, access: StateAccess, attempts: Attempts) -> dict[Path, Any]:
    """The items of a folder that say which parameters of all ranks are in which group; nothing but on rank 0."""
    groups: dict[Path, Any] = {}
    with attempts:
        groups = _own_part(all_by_name(content, state), state)[1]
    notes = attempts.agree(access, groups)
    if not access.is_global_zero:
        return {}
    flat: dict[Path, Any] = {}
    with attempts:
        for path in groups:
            for index, group in enumerate(_merged([(note or {}).get(path, []) for note in notes], access)):
                flat |= {(*path, "param_groups", index, option): value for option, value in group.items()}
    return flat


def _own_part(content: Any, state: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """What this rank's modules and optimizers hold, by path, and the optimizers' groups."""
    paths = dict(parts_in(state))
    groups = {path: _at(content, path)["param_groups"] for path, part in paths.items() if isinstance(part, Optimizer)}
    flat = {
        place: value
        for place, value in flatten(content, state).items()
        if any(place[: len(path)] == path and place[len(path) :][:1] != ("param_groups",) for path in paths)
    }
    return {place: value for place, value in flat.items() if place not in paths}, groups


def _at(content: Any, path: Path) -> Any:
    for step in path:
        content = content[next(key for key in content if str(key) == step)] if isinstance(step, str) else content[step]
    return content


def _shape(value: Tensor) -> Shape:
    return tuple(value.shape), value.dtype


def _owners(shapes: Sequence[Mapping[Path, Shape | None]]) -> dict[Path, tuple[int, Shape | None]]:
    """For each entry, the first rank that has it, and its shape if it is a tensor."""
    owners: dict[Path, tuple[int, Shape | None]] = {}
    for rank, own in enumerate(shapes):
        for path, shape in own.items():
            owners.setdefault(path, (rank, shape))
    return owners


def _brought(own: Tensor | None, owner: int, shape: Shape, access: StateAccess, group: Any) -> Tensor | None:
    """An entry on the CPU of rank 0. Only the ranks that hold it, and rank 0, take part."""
    full = None if own is None else whole(own).cpu()
    if owner == 0 or access.global_rank not in (0, owner):
        return full if access.is_global_zero else None
    received = torch.empty(shape[0], dtype=shape[1]) if full is None else full.contiguous()
    numbers = as_bytes(received)  # no backend can send each dtype
    if numbers.numel():
        if access.is_global_zero:
            torch.distributed.recv(numbers, owner, group=group)
        else:
            torch.distributed.send(numbers, 0, group=group)
    return received if access.is_global_zero else None


def _merged(of_ranks: list[list[dict[str, Any]]], access: StateAccess) -> list[dict[str, Any]]:
    """The groups of all ranks as one optimizer over all parameters would have them; options are rank 0's."""
    if len({len(groups) for groups in of_ranks}) > 1:
        raise ValueError(
            f"`fabric.save`: an optimizer has {', '.join(str(len(groups)) for groups in of_ranks)} parameter groups on"
            " the ranks. Give it the same groups on all ranks; one may be empty."
        )
    merged = []
    for groups in zip(*of_ranks, strict=True):
        names = dict.fromkeys(name for group in groups for name in group["params"])
        merged.append({**groups[0], "params": access.in_plain_order(list(names))})
    return merged


def _module_state(entries: Mapping[str, Any], versions: list[Mapping[str, Any]], access: StateAccess) -> Any:
    result = OrderedDict((name, entries[name]) for name in access.in_plain_order(list(entries)))
    result._metadata = OrderedDict()  # type: ignore[attr-defined]
    for own in reversed(versions):
        result._metadata.update(own)  # type: ignore[attr-defined]
    return result


def _replaced(value: Any, path: Path, parts: Mapping[Path, Any]) -> Any:
    if path in parts:
        return parts[path]
    if isinstance(value, Mapping) and any(part[: len(path)] == path for part in parts):
        return {key: _replaced(item, (*path, str(key)), parts) for key, item in value.items()}
    if type(value) in (list, tuple) and any(part[: len(path)] == path for part in parts):
        return type(value)(_replaced(item, (*path, index), parts) for index, item in enumerate(value))
    return value


def places_beside(value: Any, origin: Any, where: str = "state") -> Iterator[str]:
    """Where in a content tensors are that belong to no module, optimizer or other object: of those rank 0's count."""
    if is_stateful(origin):
        return
    if isinstance(value, Tensor):
        yield where
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from places_beside(item, origin[key], at(where, key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from places_beside(item, origin[index], at(where, index))


def unlike_beside(places: list[list[str]]) -> ValueError:
    """The error for tensors of a rank that would be lost, such as an average of the parameters that it holds.

    Args:
        places: What `places_beside` says on each rank.
    """
    rank, others = next((rank, others) for rank, others in enumerate(places) if set(others) != set(places[0]))
    odd = min(set(others).symmetric_difference(places[0]))
    has, has_not = (rank, 0) if odd in others else (0, rank)
    return ValueError(
        f"`fabric.save`: `{odd}` is a tensor on rank {has} and not on rank {has_not}. Of plain values only those of"
        " rank 0 are written. Keep what each rank has of its own in a module that is set up too, such as a copy of the"
        " model that was made before: `average = fabric.setup(copy.deepcopy(model))`."
    )
