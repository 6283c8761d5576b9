# SPDX-License-Identifier: Apache-2.0
"""The names of an optimizer's parameters, by which its state finds them again in whatever order they stand."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from fabric.checkpoint.access import StateAccess
from fabric.checkpoint.state.flatten import Path, key_of
from fabric.checkpoint.state.tree import is_stateful
from fabric.utilities.parameter_names import plain_name

Names = list[list[str]]  # one list for each parameter group


def parts_in(state: Any, path: Path = ()) -> Iterator[tuple[Path, Module | Optimizer]]:
    """The modules and optimizers in a user's `state`, each with its place in it."""
    if isinstance(state, Module | Optimizer):
        yield path, state
    elif isinstance(state, Mapping):
        for key, item in state.items():
            yield from parts_in(item, (*path, str(key)))
    elif type(state) in (list, tuple):
        for index, item in enumerate(state):
            yield from parts_in(item, (*path, index))


def names_in(state: Any, optimizer: Optimizer, access: StateAccess) -> Names | None:
    """The plain names of an optimizer's parameters; None where they are not known.

    They are those of the first module in `state` that has all of them. Where the parameters belong to several modules,
    each name begins with the place of its module in `state`: `generator.0.weight`. Without such modules the strategy
    is asked, which knows what it has set up.
    """
    modules = [(key_of(path), part) for path, part in parts_in(state) if isinstance(part, Module)]
    for _, module in modules:
        names = _look_up(optimizer, _named([("", module)]))
        if names is not None:
            return names
    names = _look_up(optimizer, _named(modules))
    return access.parameter_names(optimizer) if names is None else names


def _named(modules: list[tuple[str, Module]]) -> dict[int, str]:
    """The id of a parameter to its name. The first module that has it counts, and there the first of its names."""
    names: dict[int, str] = {}
    for path, module in modules:
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), plain_name(f"{path}.{name}" if path else name))
    return names


def _look_up(optimizer: Optimizer, names: Mapping[int, str]) -> Names | None:
    groups = optimizer.param_groups
    if not all(id(parameter) in names for group in groups for parameter in group["params"]):
        return None
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def own_names(optimizer: Optimizer) -> Names | None:
    """The names that the user gave, by `Optimizer(model.named_parameters())`; None where there are none."""
    names = [group.get("param_names") for group in optimizer.param_groups]
    return None if None in names else [[plain_name(name) for name in group] for group in names if group is not None]


def with_names(state: Mapping[str, Any], names: Names | None) -> dict[str, Any]:
    """An optimizer's state in PyTorch's own layout, with the names where PyTorch keeps them: `param_names`."""
    if names is None or [len(group["params"]) for group in state["param_groups"]] != list(map(len, names)):
        return dict(state)
    groups = [{**group, "param_names": own} for group, own in zip(state["param_groups"], names, strict=True)]
    return {**state, "param_groups": groups}


def by_name(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state under the names of its parameters, as a folder holds it; under numbers without names.

    `{"state": {name: {...}}, "param_groups": [{"params": [names], ...}, ...]}`
    """
    labels: dict[Any, Any] = {}
    for group in state["param_groups"]:
        labels.update(zip(group["params"], group.get("param_names", map(str, group["params"])), strict=True))
    groups = []
    for group in state["param_groups"]:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        named = "param_names" in group
        groups.append({"params": [labels[n] if named else n for n in group["params"]], **options})
    return {"state": {labels.get(key, key): entries for key, entries in state["state"].items()}, "param_groups": groups}


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """The way back from `by_name` to PyTorch's own layout. A state that is in that layout already stays as it is."""
    names = [list(group["params"]) for group in state["param_groups"]]
    flat = [name for group in names for name in group]
    if not any(isinstance(name, str) for name in flat):
        numbers: dict[Any, Any] = {str(number): number for number in flat}  # keys of a folder are text
        entries = {numbers.get(key, key): value for key, value in state.get("state", {}).items()}
        return {**state, "state": entries}
    numbers = {name: number for number, name in enumerate(flat)}
    groups = []
    for group, own in zip(state["param_groups"], names, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [numbers[name] for name in own], "param_names": own})
    entries = {numbers.get(key, key): value for key, value in state.get("state", {}).items()}
    return {**state, "state": entries, "param_groups": groups}


def all_by_name(content: Any, state: Any) -> Any:
    """A content with the states of all optimizers by name; `state` is what it was taken from."""
    if isinstance(state, Optimizer):
        return by_name(content) if content.keys() == {"state", "param_groups"} else content  # not after a filter
    if is_stateful(state):
        return content
    if isinstance(state, Mapping):
        return {key: all_by_name(item, state[key]) for key, item in content.items()}
    if type(state) in (list, tuple):
        return type(content)(all_by_name(item, origin) for item, origin in zip(content, state, strict=True))
    return content
