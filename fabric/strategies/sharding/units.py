# SPDX-License-Identifier: Apache-2.0
"""Which parts of a model are sharded, gathered and freed as a unit."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from fabric.utilities.parameter_names import plain_name

Policy = Collection[type[Module]] | Callable[..., bool]
_CONTAINERS = (ModuleList, ModuleDict)


@dataclass(frozen=True)
class Units:
    """The submodules that a policy chose.

    Args:
        modules: By name, outer ones before those inside of them.
        reason: Why these, for `fabric.explain()`.
        tied: Names of those that were left out, because they share a parameter with something outside of them.
    """

    modules: dict[str, Module]
    reason: str
    tied: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in self.kinds().items()) or "the whole model"

    def kinds(self) -> Counter[str]:
        """How many there are of each class."""
        return Counter(type(uncompiled(module)).__name__ for module in self.modules.values())


def validated_policy(policy: Any, argument: str) -> Policy | None:
    """A policy as `find_units` takes it.

    Args:
        policy: None, a class, a collection of classes, or a function; what the user wrote.
        argument: How the user wrote it, for errors.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(policy, type) and issubclass(policy, Module):
        return frozenset((policy,))
    if policy is None or (callable(policy) and not isinstance(policy, type)):
        return policy
    if not isinstance(policy, Collection) or isinstance(policy, str) or not all(map(_is_module_class, policy)):
        raise TypeError(
            f"`{argument}` takes a set of module classes, or a function that is given a submodule and says whether it"
            f" is a unit, but got `{policy!r}`. Write for example `{{Block}}`, with the class of your model's blocks."
        )
    if not policy:
        raise ValueError(f"`{argument}` is empty. Leave it out, or name the classes of your model's blocks.")
    return policy


def _is_module_class(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, Module)


def find_units(module: Module, policy: Policy | None, argument: str) -> Units:
    """The units of a model; the model itself, which always is one, is not among them.

    Args:
        module: The user's model.
        policy: Classes, or a function that says yes or no for each submodule; None for the repeated blocks.
        argument: How the user wrote the policy, for errors.

    Raises:
        ValueError: If the policy matches nothing, or something that has no forward.
    """
    inner = {name: child for name, child in module.named_modules() if child is not module}
    inner = {name: child for name, child in inner.items() if not name.endswith("_orig_mod")}  # a part of the one around
    if policy is None:
        classes, reason = _repeated(module)
        return Units({name: child for name, child in inner.items() if type(uncompiled(child)) in classes}, reason)
    chosen_ids = {id(child) for child in _choose(module, policy)}
    chosen = {name: child for name, child in inner.items() if id(child) in chosen_ids}
    if not chosen:
        kinds = ", ".join(sorted({type(uncompiled(child)).__name__ for child in inner.values()})) or "none"
        raise ValueError(
            f"`{argument}` matches no submodule of `{type(module).__name__}`, whose submodules are of the classes:"
            f" {kinds}. Choose among these, or leave the policy out to take its repeated blocks."
        )
    for name, child in chosen.items():
        if isinstance(child, _CONTAINERS) and type(child).forward is Module.forward:
            raise ValueError(
                f"`{argument}` matches `{name}`, a `{type(child).__name__}`, which is never called itself."
                " Choose the modules inside of it."
            )
    return Units(chosen, "argument")


def without_tied(module: Module, units: Units) -> Units:
    """Leave out the units that share a parameter with something outside of them: it belongs to what is around both.

    Args:
        module: The user's model.
        units: What a policy chose.
    """
    of_unit = {id(child): name for name, child in units.modules.items()}
    around: dict[int, list[set[str]]] = defaultdict(list)  # for each place of a parameter the units around it
    for parameter, path in _places(module, of_unit, frozenset()):
        around[parameter].append(set(path))
    tied: set[str] = set()
    for places in around.values():
        tied |= places[0].union(*places) - places[0].intersection(*places)
    kept = {name: child for name, child in units.modules.items() if name not in tied}
    return replace(units, modules=kept, tied=tuple(name for name in units.modules if name in tied))


def _places(module: Module, of_unit: dict[int, str], around: frozenset[str]) -> Iterable[tuple[int, frozenset[str]]]:
    name = of_unit.get(id(module))
    around = around if name is None else around | {name}
    for parameter in module.parameters(recurse=False):
        yield id(parameter), around
    for child in module.children():
        yield from _places(child, of_unit, around)


def uncompiled(module: Module) -> Module:
    """The module inside of `torch.compile(module)`; any other itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def _choose(module: Module, policy: Policy) -> list[Module]:
    if not callable(policy):
        classes = tuple(policy)
        return [child for child in module.modules() if isinstance(uncompiled(child), classes)]
    if "recurse" in inspect.signature(policy).parameters:
        return _by_recursion(module, policy, set())[1]
    return [child for child in module.modules() if policy(uncompiled(child))]


def _by_recursion(module: Module, policy: Callable[..., bool], seen: set[Module]) -> tuple[int, list[Module]]:
    """Ask a policy of PyTorch's, which is told how many elements the units inside of a module leave to it.

    Returns:
        The number of elements in the units that were found, and these.
    """
    numel = sum(parameter.numel() for parameter in module.parameters())
    inside, found = 0, list[Module]()
    if policy(module=module, recurse=True, nonwrapped_numel=numel):
        for child in module.children():
            if child not in seen:
                seen.add(child)
                count, units = _by_recursion(child, policy, seen)
                inside, found = inside + count, found + units
    if policy(module=module, recurse=False, nonwrapped_numel=numel - inside):
        return numel, [module, *found]
    return inside, found


def _repeated(module: Module) -> tuple[set[type[Module]], str]:
    """The classes of the blocks that a model repeats, and where they were seen."""
    names = getattr(module, "_no_split_modules", None)  # Hugging Face's models say so
    if names:
        found = {type(child) for child in module.modules() if type(child).__name__ in names}
        if found:
            return found, "auto: its `_no_split_modules`"
    longest: tuple[int, str, type[Module] | None] = (1, "", None)
    for name, child in module.named_modules():
        if isinstance(child, ModuleList | Sequential) and len(child):
            kinds = Counter(type(uncompiled(item)) for item in child if any(True for _ in uncompiled(item).children()))
            for kind, count in kinds.most_common(1):
                if count > longest[0]:
                    longest = (count, plain_name(name), kind)
    _, name, found_kind = longest
    if found_kind is None:
        return set(), "auto: no repeated blocks"
    return {found_kind}, f"auto: fills `{name}`" if name else "auto: fills the model"
