# SPDX-License-Identifier: Apache-2.0
"""Stages that were cut out of a forward, run one after another in one process."""

import re

import pytest
import torch
from torch import nn

from fabric.strategies.pipelining.cut import Inputs, Surroundings, build, cut_model
from tests.strategies.pipelining.asserting import Net


def run(model, cuts, *args, training=False, **kwargs):
    inputs = Inputs(model)
    surroundings = Surroundings(model, inputs.names)
    received = ()
    for cut in cuts:
        received = build(cut.graphs[training], surroundings)(*received, inputs.bind(args, kwargs))
    return received


@pytest.mark.parametrize("split_at", [["blocks.1"], ["head"], ["blocks.0", "blocks.2.1", "head"], ["blocks", "head"]])
def test_stages_in_a_row_are_the_model(split_at):
    model, x = Net(), torch.randn(3, 4)
    cuts = cut_model(model, split_at)
    assert len(cuts) == len(split_at) + 1
    for training in (False, True):
        model.train(training)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        got = run(model, cuts, x, training=training)
        assert torch.equal(got["output"], expected["output"])
        assert got["rows"] == 3


def test_what_is_in_which_stage():
    first, second, third = cut_model(Net(), ["blocks.1", "head"])
    assert (list(first.calls), list(first.reads)) == (["first", "blocks.0"], ["bias"])
    assert (list(second.calls), list(second.reads)) == (["blocks.1", "blocks.2", "first"], ["bias"])
    assert (list(third.calls), list(third.reads)) == (["head"], [])


def test_only_results_of_modules_are_sent_and_shapes_are_computed_anew():
    _, second, third = cut_model(Net(), ["blocks.1", "head"])
    received = [[node.name for node in cut.graphs[False].nodes if "received" in node.name] for cut in (second, third)]
    assert received == [["received_0", "received_1"], ["received_0"]]  # the hidden state and `early`; the hidden state


def test_tracing_leaves_the_model_as_it_was():
    model = Net().train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    names = [name for name, _ in model.named_modules()]
    cut_model(model, ["blocks.1"])
    assert [module.training for module in model.modules()] == modes
    assert [name for name, _ in model.named_modules()] == names
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())


def test_what_forward_checks_is_still_checked():
    model = Net()
    with pytest.raises(AssertionError, match=r"what line \d+ of .*asserting.py checks does not hold"):
        run(model, cut_model(model, ["head"]), torch.randn(9, 4))
    with pytest.raises(AssertionError, match=r"what line \d+ of .*asserting.py checks does not hold"):
        run(model, cut_model(model, ["head"]), torch.randn(3, 5))


def test_inputs_with_a_default_keep_it():
    model = Net()
    cuts = cut_model(model, ["head"])
    run(model, cuts, torch.randn(3, 4), mask=None)
    text = (
        "`Net.forward(mask=...)` can't be given to a model that `split_at` cuts: inputs with a default keep it. Remove"
        " the default of `mask`, or give the stages yourself: `PipelineParallelStrategy(stages=...)`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        run(model, cuts, torch.randn(3, 4), mask=torch.ones(3))


class Idle(Net):
    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(2, 2)


ERRORS = {
    ("blocks.1", "blocks.1"): "names `blocks.1` twice. Name it once.",
    (
        "block.1",
    ): "names `block.1`, which `Idle` does not have. Did you mean 'blocks.1'? Choose one of 'first', 'blocks',"
    " 'blocks.0', 'blocks.0.0', 'blocks.0.1', 'blocks.1', 'blocks.1.0', 'blocks.1.1', 'blocks.2', 'blocks.2.0',"
    " 'blocks.2.1', 'head', 'idle'.",
    ("idle",): "names `idle`, which `Idle.forward` never calls. Name a module that it calls.",
    ("blocks", "blocks.0"): "cutting at `blocks.0` would leave a stage empty, since `blocks` begins at the same place."
    " Leave it out.",
    ("first",): "cutting at `first` would leave a stage empty, since no module is called before it. Leave it out.",
}


@pytest.mark.parametrize("names", ERRORS)
def test_errors(names):
    with pytest.raises(ValueError, match=r"^`PipelineParallelStrategy") as caught:
        cut_model(Idle(), names)
    assert str(caught.value).removeprefix("`PipelineParallelStrategy(split_at=...)`").lstrip(": ") == ERRORS[names]
