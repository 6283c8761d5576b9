# SPDX-License-Identifier: Apache-2.0
"""What is so about the parameters of a model, and stays so while new ones take their places."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Module


@contextmanager
def keep_ties(module: Module) -> Iterator[None]:
    """Parameters that are one object before the block are one after it, though each name may have got a new one.

    `parallelize_module` goes through a model by the names of modules and splits what it finds there.

    Raises:
        ValueError: If the new ones are not split in the same way.
    """
    ties = list(_ties(module))
    yield
    for names in ties:
        _tie(module, names)


@contextmanager
def keep_frozen(module: Module) -> Iterator[None]:
    """Parameters without a gradient before the block have none after it, where new ones have taken their places.

    `SequenceParallel` makes all of its new parameters trainable.
    """
    frozen = {name: p for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    yield
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in frozen and parameter is not frozen[name]:
            parameter.requires_grad_(False)


def _ties(module: Module) -> Iterator[list[str]]:
    """The names of each parameter that has more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return (found for found in names.values() if len(found) > 1)


def _tie(module: Module, names: list[str]) -> None:
    first, *others = (module.get_parameter(name) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if other is first:
            continue
        if _place(other) != _place(first):
            raise ValueError(
                f"`{names[0]}` and `{name}` of `{type(module).__name__}` are one parameter, but `parallelize_fn` split"
                f" them in two ways: {_describe(first)}, and {_describe(other)}. Give both modules styles that split"
                " alike, such as `RowwiseParallel()` for an `Embedding` and `ColwiseParallel()` for the `Linear` with"
                " the same weight."
            )
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, first)


def _place(parameter: Tensor) -> tuple[object, object]:
    """Mesh and placements of a `DTensor`; nothing for a plain one."""
    return getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)


def _describe(parameter: Tensor) -> str:
    _, placements = _place(parameter)
    return "not at all" if placements is None else f"`{placements}`"
