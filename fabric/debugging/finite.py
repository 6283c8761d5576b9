# SPDX-License-Identifier: Apache-2.0
"""Which values are finite, and how they are described where they are not."""

from typing import Any

import torch
from torch import Tensor

from fabric.utilities.apply_func import apply_to_tensors
from fabric.utilities.local_parts import local_part

_CHECKED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128))


def tensors_in(data: Any) -> list[Tensor]:
    """The tensors in any nesting of containers that can be looked into."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if not tensor.is_nested and tensor.layout is torch.strided and not tensor.is_meta:
            found.append(tensor)
        return tensor

    apply_to_tensors(data, keep)
    return found


def fault_of(tensors: list[Tensor]) -> str | None:
    """`NaN` if any tensor has one, else `Inf` if any has one, else None."""
    floats = [local_part(tensor).detach() for tensor in tensors if tensor.dtype in _CHECKED]
    if all(bool(torch.isfinite(tensor).all()) for tensor in floats):
        return None
    return "NaN" if any(bool(torch.isnan(tensor).any()) for tensor in floats) else "Inf"


def is_new(fault: str | None, before: str | None) -> bool:
    """Whether a fault has come up on the way: NaN out of what had none, Inf out of finite values.

    An Inf that goes in, such as a mask's, does not excuse a NaN.
    """
    return fault is not None and before != "NaN" and not (fault == "Inf" and before == "Inf")


def describe_values(name: str, tensors: list[Tensor]) -> list[str]:
    """A line for each tensor: dtype, shape, range and mean of its finite values, how many are NaN or infinite."""
    return [f"  {name}{'' if len(tensors) == 1 else f' {i}'}: {_describe(t)}" for i, t in enumerate(tensors)]


def _describe(tensor: Tensor) -> str:
    tensor = local_part(tensor)
    head = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.dtype not in _CHECKED or tensor.numel() == 0:
        return head
    values = tensor.detach().reshape(-1)
    values = values.abs() if values.is_complex() else values
    values = values.double() if values.device.type != "mps" else values.float()
    finite = values[torch.isfinite(values)]
    parts = [head]
    if finite.numel():
        parts.append(f"min {finite.min().item():.4g}, max {finite.max().item():.4g}, mean {finite.mean().item():.4g}")
    nans, infs = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    parts += [f"{count} {what}" for count, what in ((nans, "NaN"), (infs, "Inf")) if count]
    return ", ".join(parts)
