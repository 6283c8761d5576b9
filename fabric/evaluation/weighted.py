# SPDX-License-Identifier: Apache-2.0
"""Means over all ranks in which each item counts once."""

import torch
from torch import Tensor

from fabric.checkpoint import whole
from fabric.strategies import Strategy


def weighted_mean(total: Tensor | float, count: Tensor | float, strategy: Strategy) -> Tensor:
    """The sum of the ranks' totals divided by the sum of their counts.

    Ranks that read the same data (those of one tensor-parallel group) appear equally often in both sums. Ranks that
    share a sequence (`fabric.context_parallel`) give the totals and counts of their own tokens.

    Args:
        total: A number, or a tensor of any shape.
        count: A number, or a tensor of a shape that broadcasts with that of `total`.
        strategy: Sums over the ranks.
    """
    dtype = exact_dtype(strategy.root_device)
    total, count = (whole(value) if isinstance(value, Tensor) else value for value in (total, count))
    totals = torch.as_tensor(total, dtype=dtype, device=strategy.root_device).detach()
    counts = torch.as_tensor(count, dtype=dtype, device=strategy.root_device).detach()
    if strategy.world_size > 1:
        both = strategy.all_reduce(torch.cat([totals.reshape(-1), counts.reshape(-1)]), reduce_op="sum")
        totals, counts = both[: totals.numel()].view(totals.shape), both[totals.numel() :].view(counts.shape)
    return totals / counts


def exact_dtype(device: torch.device) -> torch.dtype:
    """The widest float of a device: sums of up to 2**53 ones are exact, on `mps` up to 2**24."""
    return torch.float32 if device.type == "mps" else torch.float64
