# SPDX-License-Identifier: Apache-2.0
"""Optimizers of sharded parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fabric.checkpoint.state.shards import is_sharded, placed_like, replicated_like


def validate_owned(optimizer: Optimizer, known: Collection[int]) -> None:
    """Refuse parameters of modules that are not set up: nothing would make their gradients equal.

    Args:
        optimizer: One that holds the parameters of today.
        known: The `id` of each parameter of a module that is set up.

    Raises:
        RuntimeError: If it holds others.
    """
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strange:
        raise RuntimeError(
            f"`{type(optimizer).__name__}` holds {len(strange)} parameters of no module that is set up, the first of"
            f" shape {list(strange[0].shape)}. Set its module up first: `fabric.setup(module, optimizer)`, or"
            " `fabric.setup_module(module)` for each of several modules, then `fabric.setup_optimizers(optimizer)`."
        )


def validate_alike(optimizer: Optimizer) -> None:
    """PyTorch's joint kernels take parameters that are all plain, or all sharded.

    Raises:
        ValueError: If a group asks for such a kernel and holds others.
    """
    for group in optimizer.param_groups:
        for option in ("foreach", "fused"):
            if group.get(option) and len(set(map(is_sharded, group["params"]))) > 1:
                name = type(optimizer).__name__
                raise ValueError(
                    f"`{name}({option}=True)` updates the parameters of a group together, but some of them are sharded"
                    f" and some are not. Leave `{option}` out, or put these into two groups."
                )


def shard_state(optimizer: Optimizer) -> None:
    """Turn what an optimizer has kept about whole parameters into shards like these, in place. Nothing is sent."""
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                state[key] = _as_parameter(key, value, parameter, on_device)


def _as_parameter(key: str, value: Any, parameter: Tensor, on_device: bool) -> Any:
    if not isinstance(value, Tensor) or is_sharded(value):
        return value
    if key == "step":  # float32 in any case, and on the CPU unless the kernel wants it; as in `load_state_dict`
        return value.to(parameter.device) if on_device else value
    dtype = parameter.dtype if value.is_floating_point() else value.dtype
    if is_sharded(parameter) and value.shape != parameter.shape and value.numel() > 1:
        return replicated_like(value.to(dtype), parameter)
    if value.shape != parameter.shape:
        return value.to(device=parameter.device, dtype=dtype)
    return placed_like(value, parameter, dtype)
