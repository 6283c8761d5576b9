# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from fabric import Fabric
from tests.ranks import run_ranks


def test_one_process():
    fabric = Fabric(accelerator="cpu", devices=1)
    loss = torch.tensor([1.5, 2.5], requires_grad=True)
    mean = fabric.weighted_mean(loss.sum(), 8)
    assert (mean.item(), mean.dtype, mean.requires_grad) == (0.5, torch.float64, False)
    assert fabric.weighted_mean(torch.tensor([1, 9]), torch.tensor([2, 3])).tolist() == [0.5, 3.0]
    assert math.isnan(fabric.weighted_mean(0.0, 0).item())


def on_ranks(context):
    fabric = context.fabric(strategy="ddp")
    rank = context.rank
    losses = torch.tensor([1.0, 2.0, 3.0])[: rank + 1]  # rank 1 has two tokens
    total = torch.tensor(float(2**24)) if rank == 0 else 1.0  # float32 would lose the one
    return {
        "tokens": fabric.weighted_mean(losses.sum(), len(losses)).item(),
        "numbers": fabric.weighted_mean(rank, 2).item(),
        "classes": fabric.weighted_mean(torch.tensor([rank, 1]), torch.tensor([1, rank])).tolist(),
        "half": fabric.weighted_mean(torch.tensor(3.0, dtype=torch.bfloat16), 1).item(),
        "exact": fabric.weighted_mean(total, 0.5).item(),
        "nothing": math.isnan(fabric.weighted_mean(0, 0).item()),
    }


@pytest.mark.ranks
def test_each_item_counts_once_over_all_ranks():
    expected = {
        "tokens": 4 / 3,
        "numbers": 0.25,
        "classes": [0.5, 2.0],
        "half": 3.0,
        "exact": 2.0**24 + 1,
        "nothing": True,
    }
    assert run_ranks(2, on_ranks) == [expected, expected]
