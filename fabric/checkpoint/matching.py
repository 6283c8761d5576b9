# SPDX-License-Identifier: Apache-2.0
"""Comparing a file with the objects to restore, before any of them is changed."""

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric.checkpoint.access import StateAccess
from fabric.checkpoint.differences import Differences
from fabric.checkpoint.tree import at, holds_stateful, is_stateful
from fabric.utilities.parameter_names import under_own_names
from fabric.utilities.types import PathLike

# What PyTorch's own optimizers keep in each parameter's shape.
_SHAPED_LIKE_THE_PARAMETER = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "exp_inf")
)


class Matching:
    """Collects what is to be restored and what stands in the way.

    Args:
        access: The strategy.
        strict: Whether what is missing from the file, or unexpected in it, stands in the way.

    Attributes:
        actions: Each restores one object; to be called in this order, the same on every rank.
    """

    def __init__(self, access: StateAccess, *, strict: bool) -> None:
        self.actions: list[Callable[[], Any]] = []
        self._access = access
        self._strict = strict
        self._differences = Differences()

    def raise_differences(self, path: PathLike) -> None:
        """Raise one error that lists all differences, if there are any."""
        self._differences.raise_if_any(path)

    def match_dict(self, state: MutableMapping[Any, Any], content: Mapping[Any, Any], where: str) -> dict[Any, Any]:
        """Match a dictionary of the user's; returns what it does not ask for."""
        remainder = dict(content)
        for key, target in state.items():
            if key not in content:
                self._missing(at(where, key), key, content)
                continue
            rest = self._match(target, remainder.pop(key), at(where, key), partial(state.__setitem__, key))
            if rest:
                remainder[key] = rest
        return remainder

    def _match(self, target: Any, value: Any, where: str, put: Callable[[Any], None]) -> dict[Any, Any]:
        """Match one value of the user's; `put` replaces it. Returns what it does not ask for."""
        if is_stateful(target):
            self.match_stateful(target, value, where)
        elif isinstance(target, MutableMapping) and isinstance(value, dict):
            return self._match_inner_dict(target, value, where)
        elif type(target) in (list, tuple) and holds_stateful(target):
            self._match_items(target, value, where, put)
        elif holds_stateful(target):
            self._differences.mismatched(where, f"a {type(value).__name__} in the file", "a dict in `state`")
        elif isinstance(target, list) and isinstance(value, list):
            self.actions.append(partial(target.__setitem__, slice(None), _beside(target, value)))
        elif isinstance(target, Parameter) and isinstance(value, Tensor):
            self._match_parameter(target, value, where)
        else:
            self.actions.append(partial(put, _beside(target, value)))
        return {}

    def _match_inner_dict(self, target: MutableMapping[Any, Any], value: dict[Any, Any], where: str) -> dict[Any, Any]:
        """One that holds objects asks for its own keys; one of plain values takes all that there is."""
        rest = self.match_dict(target, value, where)
        if holds_stateful(target):
            return rest
        self.actions.append(partial(target.update, rest))
        return {}

    def _match_items(self, target: Any, value: Any, where: str, put: Callable[[Any], None]) -> None:
        if type(value) is not type(target) or len(value) != len(target):
            in_file = f"{len(value)} items" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            self._differences.mismatched(where, f"{in_file} in the file", f"{len(target)} items in `state`")
            return
        items = list(target)
        for index, (item, new) in enumerate(zip(target, value, strict=True)):
            place = target if isinstance(target, list) else items
            self._match(item, new, at(where, index), partial(place.__setitem__, index))
        if isinstance(target, tuple):
            self.actions.append(lambda: put(tuple(items)))

    def match_stateful(self, target: Any, value: Any, where: str) -> None:
        """Match a module, an optimizer or another object with its state dictionary."""
        if isinstance(target, Module | Optimizer) and not isinstance(value, Mapping):
            self._differences.mismatched(where, f"a {type(value).__name__} in the file", "needs a state dictionary")
        elif isinstance(target, Module):
            self._match_module(target, value, where)
        elif isinstance(target, Optimizer):
            self._match_optimizer(target, value, where)
        else:
            self.actions.append(partial(target.load_state_dict, value))

    def _match_module(self, module: Module, value: Mapping[str, Any], where: str) -> None:
        expected = module.state_dict()
        state_dict = under_own_names(value, module)
        owners = _custom_loaders(module)
        names = {n for n in state_dict.keys() | expected.keys() if not any(n.startswith(owner) for owner in owners)}
        if self._strict:
            missing = [n for n in expected if n in names and n not in state_dict and not _made_up(n, value)]
            unexpected = [n for n in state_dict if n in names and n not in expected]
            self._differences.names(where, missing, unexpected)
        for name in expected:
            if name in names and name in state_dict:
                self._match_shape(where, name, state_dict[name], expected[name])
        self.actions.append(partial(self._access.load_module_state_dict, module, state_dict, strict=self._strict))

    def _match_shape(self, where: str, name: str, new: Any, old: Any, owner: str = "in the module") -> None:
        if isinstance(old, Tensor) and not isinstance(new, Tensor):
            self._differences.mismatched(where, f"a {type(new).__name__} in the file", "a tensor in the module", name)
        elif isinstance(old, Tensor) and not is_lazy(old) and new.shape != old.shape:
            in_file, here = f"{tuple(new.shape)} in the file", f"{tuple(old.shape)} {owner}"
            self._differences.mismatched(where, in_file, here, name)

    def _match_optimizer(self, optimizer: Optimizer, value: Mapping[str, Any], where: str) -> None:
        if "param_groups" not in value or "state" not in value:
            self._differences.mismatched(
                where, f"the keys {', '.join(map(repr, value))} in the file", "needs 'state' and 'param_groups'"
            )
            return
        sizes = [len(group["params"]) for group in value["param_groups"]]
        here = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != here:
            self._differences.mismatched(
                where, f"groups of {sizes} parameters in the file", f"groups of {here} parameters in the optimizer"
            )
        else:
            self._match_optimizer_shapes(optimizer, value, where)
        self.actions.append(partial(self._access.load_optimizer_state, optimizer, value))

    def _match_optimizer_shapes(self, optimizer: Optimizer, value: Mapping[str, Any], where: str) -> None:
        """Only entries that are known to have their parameter's shape: other optimizers keep factors of it, say."""
        ids = [number for group in value["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(ids, parameters, strict=True):
            for name, entry in value["state"].get(number, {}).items():
                if name in _SHAPED_LIKE_THE_PARAMETER and isinstance(entry, Tensor) and entry.dim():
                    self._match_shape(where, f"{name} of parameter {number}", entry, parameter, "of the parameter")

    def _match_parameter(self, target: Parameter, value: Tensor, where: str) -> None:
        """Replacing a parameter would cut it off from its optimizer."""
        if target.shape != value.shape:
            self._differences.mismatched(
                where, f"{tuple(value.shape)} in the file", f"{tuple(target.shape)} in `state`"
            )
        self.actions.append(partial(_copy, target, value))

    def _missing(self, where: str, key: Any, content: Mapping[Any, Any]) -> None:
        if self._strict:
            self._differences.missing(where, key, content)


def _beside(old: Any, new: Any) -> Any:
    """A tensor goes to the device of the one that it replaces."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return new.to(old.device)
    if type(new) in (list, tuple) and type(old) is type(new) and len(old) == len(new):
        return type(new)(_beside(*pair) for pair in zip(old, new, strict=True))
    return new


@torch.no_grad()
def _copy(target: Parameter, value: Tensor) -> None:
    target.copy_(value)


def _custom_loaders(module: Module) -> tuple[str, ...]:
    """Prefixes under which classes of the user's, or hooks, translate names and shapes: only they know what matches."""
    prefixes = []
    for name, child in module.named_modules():
        loader = type(child)._load_from_state_dict
        custom = (
            not loader.__module__.startswith("torch.nn.") or type(child).load_state_dict is not Module.load_state_dict
        )
        if custom or child._load_state_dict_pre_hooks:
            prefixes.append(f"{name}." if name else "")
    return tuple(prefixes)


def _made_up(name: str, value: Mapping[str, Any]) -> bool:
    """Batch norms of before PyTorch 1.0 had no counter; PyTorch makes one up for files without versions."""
    return name.endswith("num_batches_tracked") and not hasattr(value, "_metadata")
