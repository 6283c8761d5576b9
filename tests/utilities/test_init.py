# SPDX-License-Identifier: Apache-2.0
"""Modules that are on the meta device and initialise themselves later."""

import pytest
import torch
from torch import nn

from fabric.utilities.init import _materialize_meta_tensors, initialise

CPU = torch.device("cpu")


class Scale(nn.Module):
    """Its constructor alone knows its values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Scaled(Scale):
    def reset_parameters(self):
        nn.init.constant_(self.weight, 5.0)


class Root(nn.Module):
    """Initialises what it holds by its own rule, after that has initialised itself."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def init_weights(self):
        nn.init.trunc_normal_(self.layer.weight, std=0.02)
        with torch.no_grad():
            self.norm.weight[1:].fill_(2.0)
        self.table = torch.arange(3.0)


class OfHuggingFace(Root):
    init_weights = None

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
        if isinstance(module, OfHuggingFace):
            module.table = torch.arange(3.0)


def on_meta(build):
    with torch.device("meta"):
        return build()


def test_reset_parameters_in_the_order_of_constructors():
    def build():
        return nn.Sequential(nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 2))

    torch.manual_seed(1)
    expected = build()
    module = on_meta(build)
    torch.manual_seed(1)
    _materialize_meta_tensors(module, CPU)
    for (name, actual), wanted in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(actual, wanted), name


@pytest.mark.parametrize("kind", [Root, OfHuggingFace])
def test_a_root_that_initialises_what_it_holds(kind):
    torch.manual_seed(1)
    expected = kind()
    if kind is Root:
        expected.init_weights()
    else:
        expected.apply(expected._init_weights)
    module = on_meta(kind)
    torch.manual_seed(1)
    _materialize_meta_tensors(module, CPU)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert module.table.tolist() == [0, 1, 2]


def test_what_has_values_keeps_them():
    module = nn.Sequential(on_meta(Scaled), Scale())
    _materialize_meta_tensors(module, CPU)
    assert module[0].weight.tolist() == [5, 5, 5]
    assert module[1].weight.tolist() == [1, 1, 1]


def test_a_module_that_does_not_say_how_is_named():
    module = nn.ModuleDict({"norm": on_meta(Scale), "other": on_meta(Scaled)})
    with pytest.raises(RuntimeError) as error:
        _materialize_meta_tensors(module, CPU)
    assert str(error.value) == (
        "`norm.weight` of `ModuleDict` can't be materialised: it is on the meta device, and `Scale` does not say which"
        " values it gets. Create the model inside `with fabric.init_module(empty_init=True):`, which notes what its"
        " constructor does; or give `Scale` a method `reset_parameters()`; or create the model for real on rank 0,"
        " which then hands it on: `with fabric.init_module(empty_init=not fabric.is_global_zero):`."
    )


def test_initialisers_that_want_arguments_are_not_called():
    class Wants(nn.Module):
        def init_weights(self, device):
            raise AssertionError

    initialise(Wants(), lambda module: True)


def test_recurrent_layers_use_their_new_parameters():
    layer = on_meta(lambda: nn.LSTM(3, 2))
    _materialize_meta_tensors(layer, CPU)
    output, _ = layer(torch.ones(4, 3))
    assert output.abs().sum() > 0
    assert all(weight is parameter for weight, parameter in zip(layer._flat_weights, layer.parameters(), strict=True))
