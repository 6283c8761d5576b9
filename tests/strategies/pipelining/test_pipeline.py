# SPDX-License-Identifier: Apache-2.0
"""What a pipeline leaves behind: nothing after an error, and groups that wait as long as the user said."""

from datetime import timedelta

import pytest
import torch
from torch import nn

from fabric.strategies import PipelineParallelStrategy
from tests.ranks import run_ranks


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def loss_of(output, target):
    if bool((target < 0).any()):
        raise ArithmeticError("a bad target")
    return (output - target).square().mean()


def step_after_an_error(context):
    fabric = context.fabric(strategy=PipelineParallelStrategy(stages=[["0", "1"]], num_microbatches=2))
    model = fabric.setup(net())
    x, good, bad = torch.ones(4, 4), torch.zeros(4, 4), torch.tensor([0.0, 0.0, 0.0, -1.0]).expand(4, 4).mT
    losses = [fabric.forward_backward(model, x, target=good, loss_fn=loss_of)]
    with pytest.raises(RuntimeError) as caught:  # PyTorch's own, around that of the user
        fabric.forward_backward(model, x, target=bad, loss_fn=loss_of)
    assert str(caught.value.__cause__) == "a bad target"
    model.zero_grad()
    losses.append(fabric.forward_backward(model, x, target=good, loss_fn=loss_of))
    return losses, [parameter.grad for parameter in model.parameters()]


@pytest.mark.ranks
def test_after_an_error_the_next_step_is_right():
    model = net()
    loss = loss_of(model(torch.ones(4, 4)), torch.zeros(4, 4))
    loss.backward()
    losses, gradients = run_ranks(1, step_after_an_error)[0]
    assert torch.allclose(torch.stack(losses), loss.detach().expand(2))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


def timeouts(context):
    strategy = PipelineParallelStrategy(split_at=["1"], data_parallel_size=2, timeout=timedelta(seconds=45))
    mesh = context.fabric(strategy=strategy).strategy.device_mesh
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


@pytest.mark.ranks
def test_the_groups_wait_as_long_as_the_user_says():
    assert run_ranks(4, timeouts) == [[timedelta(seconds=45)] * 2] * 4
