# SPDX-License-Identifier: Apache-2.0
"""Averaging over copies and adding up over stages, on real ranks."""

import pytest
import torch
import torch.distributed as dist

from fabric.strategies.pipelining import shared
from fabric.strategies.pipelining.shared import SharedGradients, average_gradients
from tests.ranks import run_ranks


def average(context, bucket):
    shared._BUCKET, before = bucket, shared._BUCKET
    context.process_group()
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float32]
    parameters = [torch.nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in dtypes]
    parameters[3].requires_grad_(False)
    for number, parameter in enumerate(parameters[:3]):
        if number != 1 or context.rank == 0:  # the second one has a gradient on rank 0 only, the last one on none
            parameter.grad = torch.full_like(parameter, 10.0 * number + context.rank + 1)
    average_gradients(parameters, dist.group.WORLD)
    shared._BUCKET = before
    return [None if parameter.grad is None else parameter.grad for parameter in parameters]


@pytest.mark.ranks
@pytest.mark.parametrize("bucket", [1, 2**20])
def test_gradients_are_averaged_and_those_that_nobody_has_stay_away(bucket):
    for first, second, third, frozen, unused in run_ranks(2, average, bucket):
        assert torch.equal(first, torch.full((2, 3), 1.5))
        assert torch.equal(second, torch.full((2, 3), 5.5))
        assert torch.equal(third, torch.full((2, 3), 21.5, dtype=torch.float64))
        assert (frozen, unused) == (None, None)


def add_up(context):
    context.process_group()
    tied, frozen = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    gradients = SharedGradients([(tied, dist.group.WORLD), (frozen, dist.group.WORLD)])
    results = []
    for step in range(2):
        with gradients.added():
            if step == 0 or context.rank == 1:
                tied.grad = torch.full((2,), context.rank + 1.0)
        results.append(tied.grad.clone())
    return results, frozen.grad


@pytest.mark.ranks
def test_tied_gradients_add_up_over_ranks_and_accumulate_over_steps():
    for (first, second), frozen in run_ranks(2, add_up):
        assert first.tolist() == [3.0, 3.0]
        assert second.tolist() == [5.0, 5.0]  # in the second step the first rank has none
        assert frozen is None
