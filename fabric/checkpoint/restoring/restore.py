# SPDX-License-Identifier: Apache-2.0
"""From full states, or those of this rank, into modules and optimizers that may be sharded. Nothing is sent."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric.checkpoint.state.shards import (
    can_take,
    copy_shard,
    is_same_memory,
    is_sharded,
    placed_like,
    replicated_like,
)
from fabric.utilities.parameter_names import rebuilt


def load_module(module: Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """`module.load_state_dict`, also for a module of which this rank holds shards.

    Args:
        module: The module, under whose own names `state_dict` is.
        state_dict: Full tensors, of which each rank takes its part, or shards like the module's. What is the module's
            own memory already is left alone.
        strict: Whether the names must be the same.

    Returns:
        The missing and the unexpected names.

    Raises:
        RuntimeError: If names differ, or shapes do.
    """
    own = module.state_dict()
    if not any(map(is_sharded, own.values())):
        return module.load_state_dict(state_dict, strict=strict)
    custom = custom_loaders(module)
    if strict:
        _validate_names(module, own.keys(), state_dict.keys(), custom)
    rest = {}
    for name, value in state_dict.items():
        done = name in own and _is_done(own[name], value)
        if name.startswith(custom) or not _took(own.get(name), value, done):
            rest[name] = _placed(value, own.get(name))
    found = module.load_state_dict(rebuilt(state_dict, rest), strict=False)
    missing = [name for name in found.missing_keys if name not in state_dict]
    if strict and (missing or found.unexpected_keys):
        raise _differs(module, missing, found.unexpected_keys)
    return type(found)(missing, found.unexpected_keys)


def _validate_names(module: Module, own: Collection[str], given: Collection[str], custom: tuple[str, ...]) -> None:
    """Before a shard gets its values; below modules that translate names only they know which they take."""
    missing = [name for name in own if name not in given and not name.startswith(custom)]
    unexpected = [name for name in given if name not in own and not name.startswith(custom)]
    if missing or unexpected:
        raise _differs(module, missing, unexpected)


def _differs(module: Module, missing: Sequence[str], unexpected: Sequence[str]) -> RuntimeError:
    lines = [*(f"  missing     {name}" for name in missing), *(f"  unexpected  {name}" for name in unexpected)]
    return RuntimeError(
        "\n".join([f"The state does not match `{type(module).__name__}`.", *lines])
        + "\nTo skip what is missing or unexpected, pass `strict=False`."
    )


def _is_done(own: Any, value: Any) -> bool:
    if not isinstance(own, Tensor) or not isinstance(value, Tensor) or is_lazy(own):
        return False
    return is_same_memory(own, value)


@torch.no_grad()
def _took(own: Any, value: Any, is_done: bool) -> bool:
    """Whether a shard of the module's own has its values now."""
    if is_done:
        return True
    if not is_sharded(own) or not isinstance(value, Tensor) or own.shape != value.shape:
        return False  # PyTorch will do that, or say what is wrong
    if is_sharded(value):
        own.copy_(value)
    else:
        copy_shard(own, value)
    return True


def _placed(value: Any, own: Any) -> Any:
    if is_sharded(own) and isinstance(value, Tensor) and not is_sharded(value) and own.shape == value.shape:
        return placed_like(value, own)
    return value


def custom_loaders(module: Module) -> tuple[str, ...]:
    """Prefixes under which classes of the user's, or hooks, translate names and shapes: only they know what matches."""
    prefixes = []
    for name, child in module.named_modules():
        loader = type(child)._load_from_state_dict
        custom = (
            not loader.__module__.startswith("torch.nn.") or type(child).load_state_dict is not Module.load_state_dict
        )
        if custom or any(not _is_pytorchs(hook) for hook in child._load_state_dict_pre_hooks.values()):
            prefixes.append(f"{name}." if name else "")
    return tuple(prefixes)


def _is_pytorchs(hook: Any) -> bool:
    """Those of sharding and of activation checkpointing leave the names of `state_dict()` as they are."""
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def load_optimizer(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict`, also for an optimizer over shards: state of a parameter's shape is sharded like it.

    Args:
        optimizer: The optimizer.
        state_dict: PyTorch's own layout, its parameters in the order of the optimizer's groups.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(map(is_sharded, parameters)):
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        owners = dict(zip(numbers, parameters, strict=False))  # PyTorch says so where there are too few
        state = {
            number: _shards_of(entries, owners[number], optimizer) if number in owners else entries
            for number, entries in state_dict["state"].items()
        }
        state_dict = {**state_dict, "state": state}
    optimizer.load_state_dict(dict(state_dict))


def _shards_of(entries: Any, parameter: Tensor, optimizer: Optimizer) -> Any:
    if not isinstance(entries, Mapping):
        return entries
    present = optimizer.state.get(parameter, {})
    return {name: _shard_of(value, parameter, present.get(name)) for name, value in entries.items()}


def _shard_of(value: Any, parameter: Tensor, present: Any) -> Any:
    if not isinstance(value, Tensor) or not is_sharded(parameter) or is_sharded(value) or not value.dim():
        return value
    dtype = state_dtype(value, parameter)
    if is_sharded(present) and can_take(present, value.shape, dtype):
        copy_shard(present, value)  # its memory is there already
        return present
    if value.shape == parameter.shape:
        return placed_like(value, parameter, dtype)
    is_plain = value.numel() == 1 or (isinstance(present, Tensor) and not is_sharded(present))
    return value if is_plain else replicated_like(value.to(dtype), parameter)  # a row of factors, say


def state_dtype(value: Tensor, parameter: Tensor) -> torch.dtype:
    """The dtype that PyTorch gives to a part of an optimizer's state: of floating-point numbers the parameter's own."""
    return parameter.dtype if value.is_floating_point() and parameter.is_floating_point() else value.dtype
