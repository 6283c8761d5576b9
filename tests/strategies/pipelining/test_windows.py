# SPDX-License-Identifier: Apache-2.0
"""Losses of micro-batches, counted over a window of batches."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric.strategies import PipelineParallelStrategy
from tests.ranks import RanksError, run_ranks


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator))


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def samples_of(batch):
    return float(len(batch[0]))


def gradients_of_a_window(context, count):
    fabric = context.fabric(strategy=PipelineParallelStrategy(split_at=["1"]))
    model, loader = fabric.setup(net()), fabric.setup_dataloaders(DataLoader(data(), 4))

    def loss_of(output, target):
        losses = (output - target).square().sum(1)
        return micro_batches.mean(losses.mean() if count is None else losses if count == "samples" else losses.sum())

    for micro_batches in fabric.accumulate(loader, 2, count=count):
        for x, y in micro_batches:
            with fabric.no_backward_sync(model, enabled=not micro_batches.is_last):
                fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("count", [None, samples_of])
def test_the_gradients_of_a_window_are_those_of_one_big_batch(count):
    model, (x, y) = net(), data().tensors
    (model(x) - y).square().sum(1).mean().backward()
    for gradients in run_ranks(2, gradients_of_a_window, count):
        assert len(gradients) == 2
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, model.get_parameter(name).grad, atol=1e-6)


@pytest.mark.ranks
def test_one_loss_for_each_sample_cannot_be_told_apart():
    text = (
        "ValueError: `micro_batches.mean(losses)` got losses of shape (2,) for a batch of 4 samples, of which `loss_fn`"
        " is given one of 2 parts at a time. Count with a function that returns one number,"
        " `fabric.accumulate(loader, steps, count=lambda batch: float(len(batch[0])))`, and pass the sum of losses."
    )
    with pytest.raises(RanksError) as caught:
        run_ranks(2, gradients_of_a_window, "samples")
    assert caught.value.failures.keys() == {0, 1}
    assert all(text in failure for failure in caught.value.failures.values())
