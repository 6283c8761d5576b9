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
from fabric.checkpoint.restoring.differences import Differences
from fabric.checkpoint.restoring.optimizers import arranged, filled, problem_of
from fabric.checkpoint.restoring.restore import custom_loaders
from fabric.checkpoint.sources import Source
from fabric.checkpoint.state.naming import by_number, names_in, own_names
from fabric.checkpoint.state.shards import copy_shard, holds_tensor, is_sharded
from fabric.checkpoint.state.tree import at, holds_stateful, is_stateful
from fabric.utilities.parameter_names import rebuilt, under_own_names, with_ties
from fabric.utilities.types import PathLike

# What PyTorch's own optimizers keep in each parameter's shape.
_SHAPED_LIKE_THE_PARAMETER = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "exp_inf")
)

Action = tuple[str, Callable[[], Any]]


class Matching:
    """Collects what is to be restored and what stands in the way.

    Args:
        source: What to restore from.
        state: All that is to be restored.
        access: The strategy.
        strict: Whether what is missing from the file, or unexpected in it, stands in the way.
        elsewhere: Where ranks hold different parameters, the names that a module or optimizer has on all of them,
            by its id.

    Attributes:
        actions: Where an object is, and what restores it; in the order in which every rank has to do that.
    """

    def __init__(
        self,
        source: Source,
        state: Any,
        access: StateAccess,
        *,
        strict: bool,
        elsewhere: Mapping[int, frozenset[str]] | None = None,
    ) -> None:
        self.actions: list[Action] = []
        self._source = source
        self._state = state
        self._access = access
        self._elsewhere = elsewhere or {}
        self._strict = strict
        self._differences = Differences()

    def _plan(self, where: str, action: Callable[[], Any]) -> None:
        self.actions.append((where, action))

    def raise_differences(self, path: PathLike) -> None:
        """Raise one error that lists all differences, if there are any."""
        self._differences.raise_if_any(path)

    def match_dict(self, state: MutableMapping[Any, Any], content: Mapping[Any, Any], where: str) -> dict[Any, Any]:
        """Match a dictionary of the user's; returns what it does not ask for."""
        remainder = dict(content)
        for key, target in state.items():
            found = str(key) if self._source.is_folder and key not in content else key  # its keys are text
            if found not in content:
                self._missing(at(where, key), key, content)
                continue
            rest = self._match(target, remainder.pop(found), at(where, key), partial(state.__setitem__, key))
            if rest:
                remainder[found] = rest
        return remainder

    def _match(self, target: Any, value: Any, where: str, put: Callable[[Any], None]) -> dict[Any, Any]:
        """Match one value of the user's; `put` replaces it. Returns what it does not ask for."""
        if is_stateful(target):
            self.match_stateful(target, value, where)
        elif isinstance(target, MutableMapping) and isinstance(value, dict):
            return self._match_inner_dict(target, value, where)
        elif type(target) in (list, tuple) and (holds_stateful(target) or _holds_parameter(target)):
            self._match_items(target, value, where, put)
        elif holds_stateful(target):
            self._differences.mismatched(where, f"a {type(value).__name__} in the file", "a dict in `state`")
        elif isinstance(target, list) and isinstance(value, list):
            self._plan(where, lambda: target.__setitem__(slice(None), self._beside(target, value)))
        elif isinstance(target, Parameter) and isinstance(value, Tensor):
            self._match_parameter(target, value, where)
        else:
            self._plan(where, lambda: put(self._beside(target, value)))
        return {}

    def _match_inner_dict(self, target: MutableMapping[Any, Any], value: dict[Any, Any], where: str) -> dict[Any, Any]:
        """One that holds objects asks for its own keys; one of plain values takes all that there is."""
        rest = self.match_dict(target, value, where)
        if holds_stateful(target):
            return rest
        self._plan(where, lambda: target.update(self._source.fetch(rest)))
        return {}

    def _match_items(self, target: Any, value: Any, where: str, put: Callable[[Any], None]) -> None:
        if type(value) not in (list, tuple) or len(value) != len(target):  # in a folder both are lists
            in_file = f"{len(value)} items" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            self._differences.mismatched(where, f"{in_file} in the file", f"{len(target)} items in `state`")
            return
        items = list(target)
        for index, (item, new) in enumerate(zip(target, value, strict=True)):
            place = target if isinstance(target, list) else items
            self._match(item, new, at(where, index), partial(place.__setitem__, index))
        if isinstance(target, tuple):
            self._plan(where, lambda: put(tuple(items)))

    def match_stateful(self, target: Any, value: Any, where: str) -> None:
        """Match a module, an optimizer or another object with its state dictionary."""
        if isinstance(target, Module | Optimizer) and not isinstance(value, Mapping):
            self._differences.mismatched(where, f"a {type(value).__name__} in the file", "needs a state dictionary")
        elif isinstance(target, Module) and not _is_state_of_module(value):
            self._differences.mismatched(where, "keys that are no names in the file", "needs a state dictionary")
        elif isinstance(target, Module):
            self._match_module(target, value, where)
        elif isinstance(target, Optimizer):
            self._match_optimizer(target, value, where)
        else:
            self._plan(where, partial(self._restore_object, target, value))

    def _restore_object(self, target: Any, value: Any) -> None:
        unread = not self._source.is_ready and holds_tensor(value, unread=self._source.is_folder)
        like = target.state_dict() if unread else None  # which may say that it is sharded
        target.load_state_dict(self._source.fetch(value, like))

    def _match_module(self, module: Module, value: Mapping[str, Any], where: str) -> None:
        expected = self._access.get_module_state_dict(module)
        state_dict = with_ties(under_own_names(value, module, expected), module, expected)
        owners = custom_loaders(module)
        names = {n for n in state_dict.keys() | expected.keys() if not any(n.startswith(owner) for owner in owners)}
        if self._strict:
            everywhere = self._elsewhere.get(id(module), expected.keys())
            made_up = partial(_made_up, value=value) if not self._source.is_folder else lambda _: False
            missing = [n for n in expected if n in names and n not in state_dict and not made_up(n)]
            unexpected = [n for n in state_dict if n in names and n not in everywhere]
            self._differences.names(where, missing, unexpected)
        for name in expected:
            if name in names and name in state_dict and not _is_extra(name):
                self._match_tensor(where, name, state_dict[name], expected[name])
        if self._elsewhere:
            state_dict = rebuilt(state_dict, {n: v for n, v in state_dict.items() if n in expected})
        self._plan(where, partial(self._restore_module, module, state_dict, expected, owners))

    def _restore_module(
        self, module: Module, state_dict: Mapping[str, Any], expected: Mapping[str, Any], owners: tuple[str, ...]
    ) -> None:
        """From a folder its tensors are read to where they belong; only what code of the user's takes goes around."""
        if self._source.is_folder:
            pairs, entries, rest = [], {}, {}
            for name, new in state_dict.items():
                own = expected.get(name)
                if (
                    not isinstance(new, Tensor)
                    or not isinstance(own, Tensor)
                    or is_lazy(own)
                    or _is_extra(name)
                    or name.startswith(owners)
                ):
                    rest[name] = new
                else:
                    entries[name] = own
                    pairs.append((own, new))
            self._source.fill(pairs)
            kept = {n: v for n, v in rest.items() if n in expected or n.startswith(owners) or not isinstance(v, Tensor)}
            # It keeps no versions of modules: as for PyTorch's own reader, they are those of today.
            state_dict = rebuilt(expected, entries | self._source.fetch(kept, expected))
        self._access.load_module_state_dict(module, state_dict, strict=self._strict)

    def _match_tensor(self, where: str, name: str, new: Any, old: Any, owner: str = "in the module") -> None:
        """Shapes and kinds must be the same; a number of the same kind is converted."""
        if not isinstance(old, Tensor):
            return
        if not isinstance(new, Tensor):
            self._differences.mismatched(where, f"a {type(new).__name__} in the file", "a tensor in the module", name)
        elif is_lazy(old):
            return
        elif not self._has_values(new) or _form(new) != _form(old):
            in_file = _form(new) if self._has_values(new) else "no values"
            self._differences.mismatched(where, f"{in_file} in the file", f"{_form(old)} {owner}", name)
        elif new.shape != old.shape:
            in_file, here = f"{tuple(new.shape)} in the file", f"{tuple(old.shape)} {owner}"
            self._differences.mismatched(where, in_file, here, name)
        elif _kind(new) != _kind(old):
            self._differences.mismatched(where, f"{_dtype(new)} in the file", f"{_dtype(old)} {owner}", name)

    def _has_values(self, tensor: Tensor) -> bool:
        """A model that was saved from the device `meta` has none."""
        return self._source.is_folder or not tensor.is_meta

    def _match_optimizer(self, optimizer: Optimizer, value: Mapping[str, Any], where: str) -> None:
        if "param_groups" not in value or ("state" not in value and not self._source.is_folder):
            self._differences.mismatched(
                where, f"the keys {', '.join(map(repr, value))} in the file", "needs 'state' and 'param_groups'"
            )
            return
        problem = problem_of(value)
        if problem is not None:
            self._differences.mismatched(where, f"{problem} in the file", "PyTorch's own layout is needed")
            return
        names = [names_in(self._state, optimizer, self._access), own_names(optimizer)]
        state, mixed = arranged(
            by_number(value), optimizer, [known for known in names if known], self._elsewhere.get(id(optimizer))
        )
        if state is None:
            self._differences.mismatched(
                where, "parameters without these names in the file", "other parameters on each rank"
            )
            return
        if mixed and self._strict:
            self._differences.mismatched(
                where, f"unlike values of {mixed} in the file", "the same parameters in one group of the optimizer"
            )
        sizes = [len(group["params"]) for group in state["param_groups"]]
        here = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != here:
            self._differences.mismatched(
                where, f"groups of {sizes} parameters in the file", f"groups of {here} parameters in the optimizer"
            )
            return
        self._match_optimizer_shapes(optimizer, state, where)
        self._plan(where, partial(self._restore_optimizer, optimizer, state))

    def _restore_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        if not self._source.is_ready:
            state = filled(state, optimizer, self._source)
        self._access.load_optimizer_state(optimizer, state)

    def _match_optimizer_shapes(self, optimizer: Optimizer, value: Mapping[str, Any], where: str) -> None:
        """Only entries that are known to have their parameter's shape: other optimizers keep factors of it, say."""
        ids = [number for group in value["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        shaped = _SHAPED_LIKE_THE_PARAMETER if _is_pytorchs(optimizer) else ()
        for number, parameter in zip(ids, parameters, strict=True):
            for name, entry in value["state"].get(number, {}).items():
                known, label = name in shaped, f"{name} of parameter {number}"
                if isinstance(entry, Tensor) and known and entry.dim():
                    self._match_tensor(where, label, entry, parameter, "of the parameter")
                elif isinstance(entry, Tensor) and not self._has_values(entry):
                    self._differences.mismatched(where, "no values in the file", "a tensor of numbers", label)
                elif not isinstance(entry, Tensor | None | int | float) and (known or name == "step"):
                    self._differences.mismatched(where, f"a {type(entry).__name__} in the file", "a tensor", label)

    def _match_parameter(self, target: Parameter, value: Tensor, where: str) -> None:
        """Replacing a parameter would cut it off from its optimizer."""
        if target.shape != value.shape:
            self._differences.mismatched(
                where, f"{tuple(value.shape)} in the file", f"{tuple(target.shape)} in `state`"
            )
        self._plan(where, partial(self._restore_parameter, target, value))

    def _restore_parameter(self, target: Parameter, value: Tensor) -> None:
        if self._source.is_folder and value.is_meta:
            self._source.fill([(target, value)])
        else:
            copy_shard(target, value)

    def _beside(self, old: Any, new: Any) -> Any:
        return _beside(old, self._source.fetch(new, old))

    def _missing(self, where: str, key: Any, content: Mapping[Any, Any]) -> None:
        if self._strict:
            self._differences.missing(where, key, content)


def _holds_parameter(value: Any) -> bool:
    """Whether there is a parameter anywhere in a value: it is filled and not replaced."""
    if isinstance(value, Mapping):
        return any(map(_holds_parameter, value.values()))
    if type(value) in (list, tuple):
        return any(map(_holds_parameter, value))
    return isinstance(value, Parameter)


def _beside(old: Any, new: Any) -> Any:
    """A tensor goes to the device of the one that it replaces."""
    if isinstance(old, Tensor) and isinstance(new, Tensor) and not is_sharded(old):
        return new.to(old.device)
    if type(new) in (list, tuple) and type(old) is type(new) and len(old) == len(new):
        return type(new)(_beside(*pair) for pair in zip(old, new, strict=True))
    return new


def _is_state_of_module(value: Mapping[Any, Any]) -> bool:
    """Names, and beside them the versions of modules by name."""
    versions = getattr(value, "_metadata", None) or {}
    if not isinstance(versions, Mapping) or not all(isinstance(version, Mapping) for version in versions.values()):
        return False
    return all(isinstance(name, str) for name in (*value, *versions))


def _is_pytorchs(optimizer: Optimizer) -> bool:
    """Whether it is one of PyTorch's own or derived from one: others keep what they like under the same names."""
    kinds = type(optimizer).__mro__
    return any(kind is not Optimizer and kind.__module__.startswith("torch.optim.") for kind in kinds)


def _form(tensor: Tensor) -> str:
    """How its numbers are stored: between these forms PyTorch converts nothing."""
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "floating"
    if tensor.is_complex():
        return "complex"
    return "bool" if tensor.dtype == torch.bool else "integer"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_extra(name: str) -> bool:
    """Whether it is what a module gives and takes by `get_extra_state` and `set_extra_state`, whatever its shape."""
    return name.rpartition(".")[2] == "_extra_state"


def _made_up(name: str, value: Mapping[str, Any]) -> bool:
    """Batch norms of before PyTorch 1.0 had no counter; PyTorch makes one up for files without versions."""
    return name.endswith("num_batches_tracked") and not hasattr(value, "_metadata")
