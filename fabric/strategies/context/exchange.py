# SPDX-License-Identifier: Apache-2.0
"""What ranks send each other so that attention sees the whole sequence, with gradients that go back the same way."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def split_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """From all heads of this rank's tokens to this rank's heads of all tokens.

    Args:
        tensors: Of shape `(..., heads, tokens, features)`; the group's size divides each number of heads.
        group: The ranks that share the sequence, in its order.

    Returns:
        Tensors of shape `(..., heads / ranks, tokens * ranks, features)`.
    """
    ranks = group.size()
    parts = [tensor.unflatten(-3, (ranks, -1)).movedim(-4, 0) for tensor in tensors]
    return [_join_tokens(part) for part in _exchange(parts, group)]


def join_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: from this rank's heads of all tokens to all heads of this rank's tokens.

    Args:
        tensor: Of shape `(..., heads / ranks, tokens * ranks, features)`.
        group: The ranks that share the sequence.
    """
    part = tensor.unflatten(-2, (group.size(), -1)).movedim(-3, 0)
    (received,) = _exchange([part], group)
    return received.movedim(0, -4).flatten(-4, -3)


def gather_tokens(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """All ranks' tokens in the order of ranks. The gradient of each token is the sum over the ranks that used it.

    Args:
        tensors: Of shape `(..., tokens, features)`.
        group: The ranks that share the sequence.

    Returns:
        Tensors of shape `(..., tokens * ranks, features)`.
    """
    parts = [tensor.expand(group.size(), *tensor.shape) for tensor in tensors]
    return [_join_tokens(part) for part in _exchange(parts, group)]


def _join_tokens(parts: Tensor) -> Tensor:
    return parts.movedim(0, -3).flatten(-3, -2)


def _exchange(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Send the part at index i of each tensor to rank i, all tensors in one message; returns what the ranks sent."""
    received = _AllToAll.apply(torch.cat([part.flatten(1) for part in parts], dim=1), group)
    split = received.split([part[0].numel() for part in parts], dim=1)
    return [flat.unflatten(1, part.shape[1:]) for flat, part in zip(split, parts, strict=True)]


class _AllToAll(torch.autograd.Function):
    """Row i goes to rank i, whose gradient for it comes back. Nothing is kept for backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient.contiguous(), ctx.group), None
