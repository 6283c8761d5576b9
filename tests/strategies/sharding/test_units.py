# SPDX-License-Identifier: Apache-2.0
"""Which parts of a model are units; no ranks needed."""

import pytest
import torch
from torch import nn

from fabric.strategies.sharding.units import Units, find_units, validated_policy, without_tied


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(2), nn.Linear(2, 2)


class Other(Block):
    pass


class Model(nn.Module):
    def __init__(self, *children):
        super().__init__()
        self.parts = nn.ModuleList(children)


def found(module, policy=None):
    units = find_units(module, validated_policy(policy, "policy"), "policy")
    return str(units), list(units.modules), units.reason


def hugging_face():
    model = Model(Block(), Other(), Other())
    model._no_split_modules = ["Block"]
    return model


REPEATED = {
    "in a list": (Model(Block(), Block()), ("2 x Block", ["parts.0", "parts.1"], "auto: fills `parts`")),
    "in a sequence": (
        nn.Sequential(nn.Flatten(), Block(), Block()),
        ("2 x Block", ["1", "2"], "auto: fills the model"),
    ),
    "the longest": (
        nn.ModuleDict({"short": Model(Block(), Block()), "long": Model(Other(), Other(), Other())}),
        ("3 x Other", [f"long.parts.{index}" for index in range(3)], "auto: fills `long.parts`"),
    ),
    "named by the model": (hugging_face(), ("1 x Block", ["parts.0"], "auto: its `_no_split_modules`")),
    "layers are no blocks": (
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))),
        ("the whole model", [], "auto: no repeated blocks"),
    ),
    "one is not repeated": (Model(Block(), nn.Linear(2, 2)), ("the whole model", [], "auto: no repeated blocks")),
    "nothing": (nn.Module(), ("the whole model", [], "auto: no repeated blocks")),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_blocks(name):
    model, expected = REPEATED[name]
    assert found(model) == expected


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, when it imports its compiler
def test_compiled_blocks_count_as_what_they_are():
    model = Model(torch.compile(Block(), backend="eager"), torch.compile(Block(), backend="eager"))
    assert found(model) == ("2 x Block", ["parts.0", "parts.1"], "auto: fills `parts`")
    assert found(model, {Block})[:2] == ("2 x Block", ["parts.0", "parts.1"])


def test_classes_include_subclasses():
    assert found(Model(Block(), Other()), Block) == ("1 x Block, 1 x Other", ["parts.0", "parts.1"], "argument")


def test_a_function_is_asked_about_each_module():
    model = Model(Block(), Block())
    assert found(model, lambda module: module is model.parts[1]) == ("1 x Block", ["parts.1"], "argument")


def test_what_shares_parameters_is_left_out():
    model = Model(Block(), Block(), Block(), Model(Block()), Block())
    model.parts[1].linear.weight = model.parts[0].linear.weight
    model.parts[3].extra = nn.Linear(2, 2)
    model.parts[3].extra.bias = model.parts[3].parts[0].linear.bias
    units = Units(
        {name: model.get_submodule(name) for name in ("parts.0", "parts.1", "parts.2", "parts.3", "parts.3.parts.0")},
        "",
    )
    kept = without_tied(model, units)
    assert list(kept.modules) == ["parts.2", "parts.3"]
    assert kept.tied == ("parts.0", "parts.1", "parts.3.parts.0")


def test_a_block_that_is_called_twice_stays():
    block = Block()
    model = Model(block, Block(), block)
    assert without_tied(model, find_units(model, None, "")).tied == ()
    assert found(model)[1] == ["parts.0", "parts.1"]
