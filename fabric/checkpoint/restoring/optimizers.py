# SPDX-License-Identifier: Apache-2.0
"""Whose state is whose: an optimizer's content compared with the optimizer that shall take it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.checkpoint.restoring.restore import state_dtype
from fabric.checkpoint.sources import Source
from fabric.checkpoint.state.naming import Names
from fabric.checkpoint.state.shards import can_take, is_sharded, replicated_like

Mismatch = Callable[[str, str], None]


def problem_of(saved: Mapping[str, Any]) -> str | None:
    """What in an optimizer's content is not as PyTorch lays it out; None if all is.

    Args:
        saved: A dictionary with `param_groups`, and `state` unless nothing is in it.
    """
    groups, state = saved["param_groups"], saved.get("state", {})
    if not isinstance(groups, list) or not all(isinstance(g, Mapping) and _is_list(g.get("params")) for g in groups):
        return "'param_groups' that are no list of groups with 'params'"
    owners = [owner for group in groups for owner in group["params"]]
    if not all(type(owner) in (int, str) for owner in owners) or len(set(owners)) < len(owners):
        return "'params' that are no numbers or names, each once"
    for group in groups:
        names = group.get("param_names") or [""] * len(group["params"])
        if not _is_list(names) or len(names) != len(group["params"]) or not all(isinstance(n, str) for n in names):
            return "'param_names' that are no list of one name for each parameter"
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__} as 'state'"
    odd = next((o for o in owners if not isinstance(state.get(o, state.get(str(o), {})), Mapping)), None)
    return None if odd is None else f"no dictionary as state of parameter {odd}"


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def arranged(
    saved: Mapping[str, Any], optimizer: Optimizer, names: Iterable[Names], everywhere: frozenset[str] | None
) -> tuple[dict[str, Any] | None, str]:
    """A saved state in the order of an optimizer's own groups: by names where they are the same, else as it is.

    Args:
        saved: PyTorch's own layout.
        optimizer: Who shall take it.
        names: What the optimizer's parameters may be called.
        everywhere: Where ranks hold different parameters, the names on all of them.

    Returns:
        The state, and options that can't be told from each other, since groups with different ones became one group.
        None where ranks hold different parameters and the names don't say which are this one's.
    """
    in_file = [group.get("param_names") for group in saved["param_groups"]]
    flat = [name for group in in_file for name in group or ()]
    if None not in in_file:
        for own in names:
            here = [name for group in own for name in group]
            if set(flat) == (everywhere or set(here)) and len(set(flat)) == len(flat):
                return _by_names(saved, optimizer, own)
    if everywhere is not None:
        return None, ""
    groups = [
        _without_names(group, own) for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=False)
    ]
    return {**saved, "param_groups": [*groups, *saved["param_groups"][len(groups) :]]}, ""


def _by_names(saved: Mapping[str, Any], optimizer: Optimizer, names: Names) -> tuple[dict[str, Any], str]:
    numbers: dict[str, Any] = {}
    homes: dict[str, Mapping[str, Any]] = {}
    for group in saved["param_groups"]:
        numbers.update(zip(group["param_names"], group["params"], strict=True))
        homes.update(dict.fromkeys(group["param_names"], group))
    flat = [name for group in names for name in group]
    state = {new: saved["state"][numbers[name]] for new, name in enumerate(flat) if numbers[name] in saved["state"]}
    used = set(numbers.values())
    state |= {key: entries for key, entries in saved["state"].items() if key not in used}
    groups, mixed, start = [], set(), 0
    for own, own_names in zip(optimizer.param_groups, names, strict=True):
        sources = list({id(homes[name]): homes[name] for name in own_names}.values())
        options, unlike = _options(sources, own)
        mixed |= unlike
        groups.append({**options, "params": list(range(start, start + len(own_names)))})
        start += len(own_names)
    return {**saved, "state": state, "param_groups": groups}, ", ".join(sorted(mixed))


def _options(sources: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The options of a group whose parameters were in these groups; it keeps its own ones where those differ."""
    if not sources:
        return _without_names(own, own), set()
    options = dict(sources[0])
    unlike = set()
    for other in sources[1:]:
        unlike |= {key for key in options.keys() | other.keys() if not _equal(options.get(key), other.get(key))}
    unlike -= {"params", "param_names"}
    options |= {key: own[key] for key in unlike if key in own}
    return _without_names(options, own), unlike


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.device.type != "meta" and torch.equal(a, b))
    return bool(a == b)


def _without_names(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Names are for finding parameters: an optimizer that was made with names keeps its own, another one gets none."""
    kept = {key: value for key, value in group.items() if key != "param_names"}
    return kept | ({"param_names": own["param_names"]} if "param_names" in own else {})


def filled(state: Mapping[str, Any], optimizer: Optimizer, source: Source) -> dict[str, Any]:
    """An optimizer's state with its values: read from a folder into what the optimizer has, or into new memory.

    The optimizer takes no step for that. What has the shape of its parameter is sharded like it.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))
    pairs: list[tuple[Tensor, Tensor]] = []
    new: dict[Any, Any] = {}
    for number, entries in state["state"].items():
        if number not in owners or not isinstance(entries, Mapping):
            new[number] = source.fetch(entries)
            continue
        new[number] = {}
        for name, value in entries.items():
            if source.is_folder and isinstance(value, Tensor) and value.is_meta:
                target = _target(name, value, owners[number], optimizer)
                pairs.append((target, value))
                new[number][name] = target
            elif _is_shard(value, owners[number]):
                new[number][name] = value  # each rank takes its part from the file itself
            else:
                new[number][name] = source.fetch(value)
    source.fill(pairs)
    others = {key: source.fetch(value) for key, value in state.items() if key not in ("state", "param_groups")}
    return {**others, "state": new, "param_groups": [_fetched(group, source) for group in state["param_groups"]]}


def _fetched(group: Mapping[str, Any], source: Source) -> dict[str, Any]:
    return {key: value if key == "params" else source.fetch(value) for key, value in group.items()}


def _is_shard(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and is_sharded(parameter) and value.dim() > 0 and value.shape == parameter.shape


def _target(name: str, value: Tensor, parameter: Tensor, optimizer: Optimizer) -> Tensor:
    """Where a tensor of the state shall be read to."""
    shaped = value.dim() > 0 and value.shape == parameter.shape
    dtype = value.dtype if name == "step" else state_dtype(value, parameter)
    present = optimizer.state.get(parameter, {}).get(name)
    if can_take(present, value.shape, dtype) and (not shaped or is_sharded(present) == is_sharded(parameter)):
        return present  # type: ignore[no-any-return]
    if shaped:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if value.dim() else torch.device("cpu")
    new = torch.empty(value.shape, dtype=dtype, device=device)
    return replicated_like(new, parameter) if is_sharded(parameter) and value.numel() > 1 else new
