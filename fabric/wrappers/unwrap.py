# SPDX-License-Identifier: Apache-2.0
"""From what `setup` returned back to the user's own objects."""

import sys
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric import data
from fabric.checkpoint.state.tree import holds_stateful
from fabric.wrappers.module import _FabricModule
from fabric.wrappers.optimizer import _FabricOptimizer


def is_wrapped(obj: object) -> bool:
    """Whether `obj` came back from `fabric.setup` or `fabric.setup_dataloaders`."""
    if isinstance(obj, Module):
        return isinstance(_unwrap_compiled(obj)[0], _FabricModule)
    if isinstance(obj, DataLoader):
        return isinstance(obj, data._FabricDataLoader)
    return isinstance(obj, _FabricOptimizer)


def _unwrap_objects(collection: Any) -> Any:
    """The same dictionaries, lists and tuples, with the user's own modules and optimizers in the place of wrappers."""
    if isinstance(collection, dict):
        return {key: _unwrap_objects(value) for key, value in collection.items()}
    if type(collection) in (list, tuple):
        return type(collection)(_unwrap_objects(value) for value in collection)
    if isinstance(collection, _FabricOptimizer):
        return collection.optimizer
    if not isinstance(collection, Module):
        return collection
    module = _unwrap_compiled(collection)[0]  # `torch.compile(fabric.setup(module))`
    return _unwrap_compiled(module.module)[0] if isinstance(module, _FabricModule) else module


def _copy_plain_values(unwrapped: Any, collection: Any) -> Any:
    """Put what was restored into copies by `_unwrap_objects` into the user's own containers, and return those."""
    if isinstance(unwrapped, dict) and isinstance(collection, dict):
        for key, value in unwrapped.items():
            collection[key] = _copy_plain_values(value, collection.get(key))
        return collection
    if type(unwrapped) in (list, tuple) and type(collection) is type(unwrapped):
        values = unwrapped
        if len(unwrapped) == len(collection) and holds_stateful(collection):  # else plain values took their place
            values = [_copy_plain_values(*pair) for pair in zip(unwrapped, collection, strict=True)]
        if isinstance(collection, tuple):
            return tuple(values)
        collection[:] = values
        return collection
    return collection if isinstance(unwrapped, Module | Optimizer) else unwrapped


def _compiled_class() -> tuple[type[Module], ...]:
    """The class of `torch.compile(module)`, where its package, which is slow to import, was imported at all."""
    dynamo = sys.modules.get("torch._dynamo")
    return (dynamo.OptimizedModule,) if dynamo is not None else ()


def _unwrap_compiled(module: Module) -> tuple[Module, Callable[[Module], Module] | None]:
    """The module inside `torch.compile(module)`, and a function that compiles another module alike.

    The function is None where `module` is not compiled, or where PyTorch does not offer it.
    """
    if not isinstance(module, _compiled_class()):
        return module, None
    return module._orig_mod, getattr(module, "dynamo_ctx", None)  # type: ignore[return-value]
