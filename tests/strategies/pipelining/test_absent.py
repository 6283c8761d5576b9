# SPDX-License-Identifier: Apache-2.0
"""What is left of a model on one rank."""

import pytest
import torch
from torch import nn

from fabric.strategies.pipelining.absent import Absent, strip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))


def kept_of(model, *names):
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return {id(state[name]) for name in names}


def test_names_stay_and_the_rest_is_gone():
    model = Net()
    strip(model, kept_of(model, "scale", "layers.1.0.weight", "layers.1.0.bias"))
    assert list(model.state_dict()) == ["scale", "layers.1.0.weight", "layers.1.0.bias"]
    assert [type(layer) for layer in model.layers] == [Absent, nn.Sequential, Absent]
    assert (model.shift, model.seen) == (None, None)
    assert isinstance(model.layers[1][1], nn.ReLU)


def test_the_state_of_the_whole_model_can_be_loaded_and_nothing_else():
    model, whole = Net(), Net()
    strip(model, kept_of(model, "scale", "layers.1.0.weight", "layers.1.0.bias"))
    model.load_state_dict(whole.state_dict())
    assert torch.equal(model.layers[1][0].weight, whole.layers[1][0].weight)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**whole.state_dict(), "other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"scale": torch.ones(2)})
