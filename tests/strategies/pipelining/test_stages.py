# SPDX-License-Identifier: Apache-2.0
"""Stages that the user gives, and what of a model stays on a rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fabric.strategies import PipelineParallelStrategy
from tests.ranks import run_ranks


class Half(nn.Module):
    """A stage with a mode of its own, which `model.eval()` can't know."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return F.dropout(self.layer(x), 0.5, self.training)


def evaluate_halves(context):
    strategy = PipelineParallelStrategy(stages=lambda module, index, num_stages: Half(module[index]))
    fabric = context.fabric(strategy=strategy)
    torch.manual_seed(1)
    model = fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    outputs = []
    for mode in (False, True, False):
        model.train(mode)
        with torch.no_grad():
            outputs.append(model(torch.ones(2, 4)))
    return outputs


@pytest.mark.ranks
def test_modules_around_the_models_own_follow_its_mode():
    torch.manual_seed(1)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))(torch.ones(2, 4))
    for before, training, after in run_ranks(2, evaluate_halves):
        assert torch.equal(before, expected)
        assert not torch.allclose(training, expected)
        assert torch.equal(after, expected)


class Aliases(nn.Module):
    """A submodule and a parameter that both have two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.other = self.second
        self.last.also = self.last.weight

    def forward(self, x):
        return self.last(self.other(self.first(x)))


def held_names(context):
    fabric = context.fabric(strategy=PipelineParallelStrategy(split_at=["second"]))
    model = fabric.setup(Aliases())
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


@pytest.mark.ranks
def test_what_other_ranks_hold_is_gone_under_all_its_names():
    first, second = run_ranks(2, held_names)
    assert first == ["first.weight", "first.bias"]
    assert second == [
        *("second.weight", "second.bias", "last.weight", "last.bias", "last.also"),
        *("other.weight", "other.bias"),
    ]
