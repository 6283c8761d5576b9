# SPDX-License-Identifier: Apache-2.0
"""Tensors of which each rank holds a part: PyTorch's `DTensor` is the description of a shard."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def is_sharded(value: Any) -> bool:
    """Whether a value is a `DTensor`. Where its package, which is slow to import, was not imported, nothing is."""
    if not isinstance(value, Tensor):
        return False
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def holds_sharded(value: Any) -> bool:
    """Whether there is a `DTensor` anywhere in a value."""
    if isinstance(value, Mapping):
        return any(map(holds_sharded, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_sharded, value))
    return is_sharded(value)


def holds_tensor(value: Any, *, unread: bool = False) -> bool:
    """Whether there is a tensor anywhere in a value; with `unread`, one on the device `meta`."""
    if isinstance(value, Mapping):
        return any(holds_tensor(item, unread=unread) for item in value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensor(item, unread=unread) for item in value)
    return isinstance(value, Tensor) and (value.is_meta or not unread)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on its device. Collective over the ranks of its mesh where it is sharded.

    One dimension of the mesh after the other is gathered: asked for several at once, PyTorch logs advice to do so.
    """
    if not is_sharded(tensor):
        return tensor
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    device_type = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    if tensor.device.type != device_type:  # an offloaded one
        tensor = tensor.to(device_type)
    for dim in range(tensor.device_mesh.ndim):  # type: ignore[attr-defined]
        placements = list(tensor.placements)  # type: ignore[attr-defined]
        placements[dim] = replicate
        tensor = tensor.redistribute(placements=placements)  # type: ignore[attr-defined]
    return tensor.to_local()  # type: ignore[attr-defined,no-any-return]


@torch.no_grad()
def copy_shard(target: Tensor, full: Tensor) -> None:
    """Copy a full tensor into one of which this rank may hold a part only. Nothing is sent.

    Args:
        target: A plain tensor, or a `DTensor` of the same (global) shape.
        full: All of it, on any device; what lies in a memory-mapped file is read only where it is needed.
    """
    if not is_sharded(target):
        target.copy_(full)
        return
    # The protocol by which PyTorch's distributed checkpoint asks a DTensor where in the whole its part lies.
    chunks = target.__create_chunk_list__()  # type: ignore[attr-defined]
    local = target.to_local()  # type: ignore[attr-defined]
    for chunk in chunks:
        part = full
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, offset, size) if size else part.narrow(dim, 0, 0)
        local.copy_(part)


@torch.no_grad()
def placed_like(full: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor with the values of `full`, sharded like another one of that shape, or else on its device.

    Args:
        full: All of it.
        like: The parameter whose place it shall have.
        dtype: By default that of `full`.
    """
    dtype = dtype or full.dtype
    if not is_sharded(like):
        return full.to(device=like.device, dtype=dtype)
    placed = torch.empty_like(like, dtype=dtype, requires_grad=False)
    copy_shard(placed, full)
    return placed


@torch.no_grad()
def replicated_like(full: Tensor, like: Tensor) -> Tensor:
    """A tensor that each rank has the whole of, in the form in which PyTorch computes with it and a sharded one."""
    package = sys.modules["torch.distributed.tensor"]
    mesh = like.device_mesh  # type: ignore[attr-defined]
    placements = [package.Replicate()] * mesh.ndim
    local = full.to(like.device)
    return package.DTensor.from_local(local, mesh, placements, run_check=False)  # type: ignore[no-any-return]


def can_take(present: Any, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether a value is a tensor into which others of this shape can be read, whole or this rank's part."""
    if not isinstance(present, Tensor) or present.shape != shape or present.dtype != dtype:
        return False
    return not is_sharded(present) or not any(p.is_partial() for p in present.placements)  # type: ignore[attr-defined]


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same elements, so that copying one into the other does nothing."""
    if is_sharded(a) != is_sharded(b) or a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if is_sharded(a):
        a, b = a.to_local(), b.to_local()  # type: ignore[attr-defined]
    if a.device.type == "meta" or not a.numel():
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape
