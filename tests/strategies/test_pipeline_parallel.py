# SPDX-License-Identifier: Apache-2.0
"""Pipelines on real ranks, against plain PyTorch in one process on the whole batch."""

import gc
import inspect
import re
import warnings
import weakref
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fabric import Fabric
from fabric.plugins.precision import MixedPrecision
from fabric.strategies import PipelineParallelStrategy
from tests.debugging.jobs import debugged
from tests.ranks import run_ranks

STEPS, BATCH, WIDTH, BYTES = 3, 8, 16, 11
TOLERANCES = {
    "32-true": 1e-5,
    "64-true": 1e-13,
    "16-true": 1e-2,
    "bf16-true": 8e-2,
    "bf16-mixed": 3e-2,
    "16-mixed": 1e-2,
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A small language model: an assertion, a parameter and a buffer of its own, and a shape that is used later."""

    def __init__(self, tied=False):
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, WIDTH), nn.Parameter(torch.randn(6, WIDTH) * 0.1)
        self.register_buffer("scale", torch.full((WIDTH,), 0.9))
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens):
        _, length = tokens.size()
        assert length <= 6, "too long"
        x = self.token(tokens) + self.position[:length]
        for layer in self.layers:
            x = layer(x) * self.scale
        return self.head(self.norm(x) / length)


def loss_of(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    """What is trained; the arguments of the strategy stand beside it."""

    precision: str = "32-true"
    accumulation: int = 1
    clipping: str = "norm"
    tied: bool = False
    optimizer: str = "sgd"
    frozen: str = ""


def build(case):
    torch.manual_seed(1)
    model = Net(case.tied)
    for parameter in model.get_submodule(case.frozen).parameters() if case.frozen else ():
        parameter.requires_grad_(False)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}]
    if case.optimizer == "adam":
        return model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)
    return model, torch.optim.SGD(groups, lr=0.5, momentum=0.9)


def batch(step, micro=0, size=BATCH, length=6):
    generator = torch.Generator().manual_seed(100 * step + micro)
    blocks = torch.randint(BYTES, (size, length + 1), generator=generator)
    return blocks[:, :-1], blocks[:, 1:]


@cache
def plain(case):
    """Losses, norms and parameters of one process, by hand."""
    model, optimizer = build(case)
    dtype = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}.get(case.precision)
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(case.precision)
    model.to(dtype)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(case.accumulation):
            x, y = batch(step, micro)
            with torch.autocast("cpu", dtype=mixed, enabled=mixed is not None):
                output = model(x)
            loss = loss_of(output if dtype is torch.float64 else output.float(), y)
            (loss / case.accumulation).backward()
            losses.append(loss.item())
        if case.clipping == "norm":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        elif case.clipping == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def train(context, case, arguments):
    """The same under a pipeline: what each rank returns, and the parameters that it holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy = PipelineParallelStrategy(**arguments)
        fabric = context.fabric(strategy=strategy, precision=case.precision)
        model, optimizer = fabric.setup(*build(case))
        copies, copy = strategy.data_parallel_size, strategy.data_parallel_rank
        losses, norms = [], []
        for step in range(STEPS):
            for micro in range(case.accumulation):
                x, y = (part.chunk(copies)[copy] for part in batch(step, micro))
                with fabric.no_backward_sync(model, enabled=micro < case.accumulation - 1):
                    loss = fabric.forward_backward(
                        model, x, target=y, loss_fn=lambda *args: loss_of(*args) / case.accumulation
                    )
                losses.append(fabric.all_reduce(loss).item() * case.accumulation)
            if case.clipping == "norm":
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
            elif case.clipping == "value":
                fabric.clip_gradients(model, optimizer, clip_val=0.01)
            optimizer.step()
            optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fabric.teardown()
    return losses, norms, state


def compare(case, ranks):
    losses, norms, parameters = plain(case)
    tolerance = TOLERANCES[case.precision]
    for got_losses, got_norms, _ in ranks:
        assert got_losses == pytest.approx(losses, rel=tolerance)
        assert got_norms == pytest.approx(norms, rel=10 * tolerance)
    union = {}
    for _, _, state in ranks:
        for name, tensor in state.items():
            assert name not in union or torch.equal(union[name], tensor), name
            union[name] = tensor
    assert union.keys() == parameters.keys()
    for name, tensor in parameters.items():
        if case.optimizer == "adam":
            continue
        assert (union[name] - tensor).norm() <= 20 * tolerance * tensor.norm() + 1e-6, name


TWO = {"split_at": ["layers.3"]}
FOUR = {"split_at": ["layers.1", "layers.3", "layers.5"]}
LAYOUTS = {
    "gpipe": (2, {**TWO, "schedule": "gpipe", "num_microbatches": 4}),
    "1f1b": (2, {**TWO, "schedule": "1f1b", "num_microbatches": 4}),
    "interleaved": (2, {**FOUR, "schedule": "interleaved_1f1b", "num_microbatches": 4}),
    "looped_bfs": (2, {**FOUR, "schedule": "looped_bfs", "num_microbatches": 2}),
    "zero_bubble": (2, {**FOUR, "schedule": "interleaved_zero_bubble", "num_microbatches": 4}),
    "zbv": (2, {**FOUR, "schedule": "zbv_zero_bubble", "num_microbatches": 4}),
    "1f1b of 4": (4, {**FOUR, "schedule": "1f1b"}),
    "gpipe 2x2": (4, {**TWO, "schedule": "gpipe", "data_parallel_size": 2, "num_microbatches": 2}),
    "1f1b 2x2": (4, {**TWO, "schedule": "1f1b", "data_parallel_size": 2}),
    "interleaved 2x2": (4, {**FOUR, "schedule": "interleaved_1f1b", "data_parallel_size": 2}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_process(layout):
    ranks, arguments = LAYOUTS[layout]
    compare(Case(), run_ranks(ranks, train, Case(), arguments))


CASES = {
    "accumulation": Case(accumulation=3),
    "no clipping": Case(accumulation=2, clipping="off"),
    "by value": Case(clipping="value"),
    "tied": Case(accumulation=2, tied=True),
    "adam": Case(optimizer="adam"),
    "frozen first layers": Case(frozen="token"),
    "frozen in the middle": Case(frozen="layers.4"),
    "frozen layers": Case(frozen="layers"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["1f1b", "zbv", "gpipe 2x2", "interleaved"])
def test_the_parts_of_a_step(layout, name):
    ranks, arguments = LAYOUTS[layout]
    compare(CASES[name], run_ranks(ranks, train, CASES[name], arguments))


@pytest.mark.ranks
@pytest.mark.parametrize("precision", [name for name in TOLERANCES if name != "32-true"])
@pytest.mark.parametrize("layout", ["1f1b", "interleaved 2x2"])
def test_precisions(layout, precision):
    ranks, arguments = LAYOUTS[layout]
    case = Case(precision=precision)
    compare(case, run_ranks(ranks, train, case, arguments))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------
class Several(nn.Module):
    """Returns more than a tensor, in training less than in evaluation, and has batch statistics and dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch, scale=2.0):
        hidden = self.dropout(self.norm(self.first(batch["x"])))
        output = self.second(hidden) * scale
        return output if self.training else {"output": output, "hidden": [hidden], "name": "several"}


def evaluate(context, arguments):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**arguments))
    model = fabric.setup(build(Case())[0])
    outputs = []
    with torch.no_grad():
        for size, length in ((8, 6), (3, 6), (1, 6), (8, 2), (8, 6)):
            outputs.append(model(batch(0, size=size, length=length)[0]))
        x, y = batch(0)
    loss = fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
    with torch.inference_mode():
        outputs.append(model(x))
    return outputs, loss


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["1f1b", "interleaved", "zbv", "1f1b of 4", "gpipe 2x2"])
def test_evaluation_gives_every_rank_the_output_for_the_whole_batch_of_any_size(layout):
    model, _ = build(Case())
    sizes = ((8, 6), (3, 6), (1, 6), (8, 2), (8, 6), (8, 6))
    with torch.no_grad():
        expected = [model(batch(0, size=size, length=length)[0]) for size, length in sizes]
        loss = loss_of(expected[-1], batch(0)[1])
    ranks, arguments = LAYOUTS[layout]
    for outputs, got in run_ranks(ranks, evaluate, arguments):
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.shape == wanted.shape
            assert torch.allclose(output, wanted, atol=1e-6)
        assert torch.allclose(got, loss, atol=1e-6)


def train_several(context):
    fabric = context.fabric(strategy=PipelineParallelStrategy(split_at=["norm"], schedule="gpipe", num_microbatches=2))
    torch.manual_seed(1)
    model = fabric.setup(Several())
    x = torch.randn(6, 4)
    before = torch.get_rng_state()
    model.train()
    fabric.forward_backward(model, {"x": x}, target=None, loss_fn=lambda output, _: output.mean())
    drawn = not torch.equal(before, torch.get_rng_state())
    statistics = [model.norm.num_batches_tracked.item(), model.norm.running_mean] if context.rank == 1 else None
    model.eval()
    with torch.no_grad():
        return statistics, drawn, model({"x": x})


@pytest.mark.ranks
def test_modes_batch_statistics_and_outputs_of_any_kind():
    torch.manual_seed(1)
    model = Several()
    x = torch.randn(6, 4)
    with torch.no_grad():
        for part in x.chunk(2):
            model.norm(model.first(part))
        model.eval()
        expected = model({"x": x})
    (_, drew_first, output), (statistics, drew_second, same) = run_ranks(2, train_several)
    assert statistics[0] == 2  # one for each micro-batch, and none for learning the shapes
    assert torch.allclose(statistics[1], model.norm.running_mean, atol=1e-6)
    assert (drew_first, drew_second) == (False, True)  # dropout is on the second rank
    for got in (output, same):
        assert got["name"] == "several"
        assert torch.allclose(got["output"], expected["output"], atol=1e-6)
        assert torch.allclose(got["hidden"][0], expected["hidden"][0], atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers and state
# ---------------------------------------------------------------------------------------------------------------------
def look_at_an_optimizer(context):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**TWO))
    model, optimizer = build(Case(optimizer="adam"))
    x, y = batch(9)
    loss_of(model(x), y).backward()
    optimizer.step()  # before setup: the state has to stay
    optimizer.zero_grad()
    groups = list(optimizer.param_groups)
    states = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    freed = [weakref.ref(parameter) for parameter in model.parameters()]
    model, optimizer = fabric.setup(model, optimizer)
    held = dict(model.named_parameters())
    gc.collect()
    assert all(old is new for old, new in zip(groups, optimizer.param_groups, strict=True))
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in held.values()}
    assert all(optimizer.state[held[name]]["exp_avg"] is states[name] for name in held)
    assert len(optimizer.state) == len(held)
    assert sum(reference() is not None for reference in freed) == len(held)
    later = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [parameter.clone() for parameter in held.values()]
    fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
    later.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, held.values(), strict=True))
    with pytest.raises(RuntimeError) as caught:
        fabric.setup_optimizers(torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1))
    return sorted(held), fabric.strategy.parameter_names(optimizer.optimizer), repr(model), str(caught.value)


@pytest.mark.ranks
def test_an_optimizer_made_before_keeps_its_groups_and_what_this_rank_holds_of_its_state():
    model, _ = build(Case())
    first, second = run_ranks(2, look_at_an_optimizer)
    assert sorted(first[0] + second[0]) == sorted(dict(model.named_parameters()))
    assert "layers.2.up.weight" in first[0]
    assert "position" in first[0]
    assert "layers.3.up.weight" in second[0]
    for held, names, *_ in (first, second):
        assert sorted(name for group in names for name in group) == held
        assert all(name.endswith("weight") or name == "position" for name in names[0])
    assert "(3-5): 3 x Absent(held by another rank of the pipeline)" in first[2]
    assert first[3] == (
        "`SGD` has a parameter of shape [3, 2] in group 0 that belongs to no model that was set up, so it is not known"
        " which rank of the pipeline holds it. Set its model up before, or together: `fabric.setup(model, optimizer)`."
    )


def load_a_plain_state(context, state):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**TWO))
    model = fabric.setup(Net())
    model.load_state_dict(state)
    with torch.no_grad():
        output = model(batch(0)[0])
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({"tokens": torch.zeros(1), **state})
    return output, str(caught.value)


@pytest.mark.ranks
def test_the_state_of_the_plain_model_can_be_loaded():
    model, _ = build(Case())
    for output, text in run_ranks(2, load_a_plain_state, model.state_dict()):
        assert torch.allclose(output, model(batch(0)[0]), atol=1e-6)
        assert text == 'Error(s) in loading state_dict for Net:\n\tUnexpected key(s) in state_dict: "tokens". '


def save_and_go_on(context, arguments, path):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**arguments))
    model, optimizer = fabric.setup(*build(Case(optimizer="adam")))
    strategy = fabric.strategy
    for step in range(2):
        if step == 1:
            fabric.save(path, {"model": model, "optimizer": optimizer, "step": step})
        x, y = (part.chunk(strategy.data_parallel_size)[strategy.data_parallel_rank] for part in batch(step))
        fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def load_and_go_on(context, arguments, path):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**arguments))
    torch.manual_seed(7)
    model = Net()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": [p for p in model.parameters() if p.dim() < 2]}]
    model, optimizer = fabric.setup(model, torch.optim.AdamW(groups, lr=0.3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 1
    strategy = fabric.strategy
    x, y = (part.chunk(strategy.data_parallel_size)[strategy.data_parallel_rank] for part in batch(1))
    fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
    optimizer.step()
    return model.state_dict()


def union_of(states):
    return {name: tensor for state in states for name, tensor in state.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["interleaved"])
def test_a_folder_goes_from_one_pipeline_to_another(layout, tmp_path):
    ranks, arguments = LAYOUTS[layout]
    expected = union_of(run_ranks(ranks, save_and_go_on, arguments, tmp_path / "checkpoint"))
    assert (tmp_path / "checkpoint" / ".metadata").is_file()
    again = union_of(run_ranks(2, load_and_go_on, LAYOUTS["1f1b"][1], tmp_path / "checkpoint"))
    assert again.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(tensor, again[name], atol=1e-5), name


# ---------------------------------------------------------------------------------------------------------------------
# Other ways to say the stages, and what is not possible
# ---------------------------------------------------------------------------------------------------------------------
class Chain(nn.Module):
    """Its forward decides on values, so that it can't be cut, but for stages that the user gives."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)
        self.d = nn.Linear(3, 2)

    def forward(self, x):
        x = self.b(self.a(x))
        if x.sum() > 1e9:
            x = x / 2
        return self.d(self.c(x))


class Half(nn.Module):
    """A stage by hand, which receives and hands on two tensors."""

    def __init__(self, model, index):
        super().__init__()
        self.index = index
        self.layers = nn.ModuleList([model.a] if index == 0 else [model.c, model.d])

    def forward(self, *tensors):
        if self.index == 0:
            return self.layers[0](tensors[0]).T.contiguous().T, tensors[0].sum(1, keepdim=True).long()
        hidden, count = tensors
        assert count.dtype is torch.int64
        return self.layers[1](self.layers[0](hidden.tanh()))


def by_hand(module, index, num_stages):
    return Half(module, index)


def train_chain(context, arguments):
    fabric = context.fabric(strategy=PipelineParallelStrategy(num_microbatches=2, **arguments))
    torch.manual_seed(context.rank)  # unlike models: those of rank 0 count
    model = Chain()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.arange(32.0).view(8, 4) / 32, batch_size=4))
    losses = []
    for x in loader:
        losses.append(fabric.forward_backward(model, x, loss_fn=lambda output, target: output.square().mean()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen = fabric.gather_for_metrics(model(x), loader)
    return torch.stack(losses), seen, model.state_dict(), fabric.explain()


GIVEN = {
    "names": {"stages": [["a", "b"], ["c", "d"]]},
    "a function": {"stages": by_hand, "schedule": "gpipe"},
    "several on a rank": {"stages": [["a"], ["b"], ["c"], ["d"]], "schedule": "interleaved_1f1b"},
    "alone": {"stages": [["a", "b", "c", "d"]]},
    "several, alone": {"stages": [["a"], ["b", "c"], ["d"]], "schedule": "looped_bfs"},
}
ALONE = {"alone": 1, "several, alone": 1}  # a pipeline of one rank


@pytest.mark.ranks
@pytest.mark.parametrize("name", GIVEN)
def test_stages_by_hand(name):
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x in (torch.arange(32.0).view(8, 4) / 32).split(4):
        losses.append(model(x).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks = run_ranks(ALONE.get(name, 2), train_chain, GIVEN[name])
    for got, seen, _, _ in ranks:
        assert torch.allclose(got, torch.stack(losses), atol=1e-6)
        assert torch.allclose(seen, model(x), atol=1e-6)
    union = union_of(state for _, _, state, _ in ranks)
    assert union.keys() == model.state_dict().keys()
    assert all(torch.allclose(union[key], value, atol=1e-6) for key, value in model.state_dict().items())


@pytest.mark.ranks
def test_what_was_decided_is_shown():
    _, _, _, table = run_ranks(2, train_chain, GIVEN["several on a rank"])[0]
    rows = [" ".join(line.split()) for line in table.splitlines()[-5:]]
    assert rows == [
        "pipeline Chain: interleaved_1f1b, 2 micro-batches, 4 stages on 2 ranks argument",
        "stage 0 a on rank 0 (stages)",
        "stage 1 b on rank 1 (stages)",
        "stage 2 c on rank 0 (stages)",
        "stage 3 d on rank 1 (stages)",
    ]


class Unused(Chain):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(2, 2)


class Apart(nn.Module):
    """Its second module needs nothing of the first."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.a(x)
        return self.b(x)


class Ranked(nn.Sequential):
    """Not the same on all ranks."""

    def __init__(self):
        width = 4 + torch.distributed.get_rank()
        super().__init__(nn.Linear(4, width), nn.Linear(width, 2))


def strange(module, index, num_stages):
    return nn.Linear(2, 2)


def nothing(module, index, num_stages):
    return None


def setup_error(context, model, arguments):
    with pytest.raises((TypeError, ValueError)) as caught:
        context.fabric(strategy=PipelineParallelStrategy(**arguments)).setup(model())
    return str(caught.value)


THE = "`PipelineParallelStrategy(split_at=...)`"
GIVEN_BY = "`PipelineParallelStrategy(stages=...)`"
SETUP_ERRORS = [
    (
        (2, Net, {"split_at": ["layers.9"]}),
        f"{THE} names `layers.9`, which `Net` does not have. Did you mean 'layers'? Choose one of 'token', 'layers',"
        " 'norm', 'head'.",
    ),
    (
        (2, Net, {"split_at": ["layers.1", "layers.3"]}),
        "`PipelineParallelStrategy(schedule='1f1b')` runs 1 stage per rank, but the model is cut into 3 stages and the"
        " pipeline has 2 ranks. Cut it into another number of stages, or set `pipeline_parallel_size`.",
    ),
    (
        (2, Net, {"split_at": ["layers.3"], "schedule": "zbv_zero_bubble"}),
        "`PipelineParallelStrategy(schedule='zbv_zero_bubble')` runs 2 stages per rank, but the model is cut into 2"
        " stages and the pipeline has 2 ranks. Cut it into another number of stages, or choose another schedule (gpipe,"
        " 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble), or set `pipeline_parallel_size`.",
    ),
    (
        (3, Net, {"split_at": ["layers.3"]}),
        "`PipelineParallelStrategy`: the model is cut into 2 stages, but the pipeline has 3 ranks, some of which would"
        " have nothing to do. Name more modules in `split_at`, or set `pipeline_parallel_size=2` and let"
        " `data_parallel_size` take the other ranks.",
    ),
    (
        (2, Net, {"split_at": ["layers.3"], "pipeline_parallel_size": 2, "data_parallel_size": 2}),
        "`PipelineParallelStrategy`: pipeline_parallel_size=2 * data_parallel_size=2 can't be divided over 2 processes:"
        " the sizes multiply to 4. Make them multiply to 2, or leave one of them 'auto'.",
    ),
    (
        (2, Net, {"split_at": ["layers.3"], "num_microbatches": 1}),
        "`PipelineParallelStrategy(schedule='1f1b', num_microbatches=1)`: this schedule needs at least as many"
        " micro-batches as there are stages, 2.",
    ),
    (
        (2, Net, {**FOUR, "schedule": "interleaved_1f1b", "num_microbatches": 5}),
        "`PipelineParallelStrategy(schedule='interleaved_1f1b', num_microbatches=5)`: this schedule needs a number of"
        " micro-batches that 2 rounds can share, such as 4.",
    ),
    (
        (2, Net, {"split_at": ["token"]}),
        f"{THE}: cutting at `token` would leave a stage empty, since no module is called before it. Leave it out.",
    ),
    (
        (2, Chain, {"split_at": ["c"]}),
        f"{THE} can't cut `Chain`: the forward of `Chain` can't be traced (TraceError: symbolically traced variables"
        " cannot be used as inputs to control flow). A forward that is cut may call modules and operations one after"
        " another, but not decide on the values of tensors. Move that into a submodule, or give the stages yourself:"
        f" {GIVEN_BY}.",
    ),
    (
        (2, Apart, {"split_at": ["b"]}),
        f"{THE}: stage 1 needs nothing from the stages before it, so they would train nothing. Cut where a result is"
        " handed on.",
    ),
    (
        (2, Unused, {"stages": [["a", "b"], ["c", "d"]]}),
        "`PipelineParallelStrategy`: 2 parameters of `Unused` are in no stage, the first is `extra.weight`, so no rank"
        " would hold them. Use them in a stage, or take them out of the model before `fabric.setup(...)`.",
    ),
    (
        (2, Chain, {"stages": [["a", "b"], ["c", "e"]]}),
        f"{GIVEN_BY} names `e` in stage 1, which `Chain` does not have. Choose one of 'a', 'b', 'c', 'd'.",
    ),
    (
        (2, Chain, {"stages": strange}),
        f"{GIVEN_BY}: `stages(module, 0, 2)` returned a module whose parameter `weight` is none of the model's. Build"
        " it of the model's own submodules, without copying them.",
    ),
    (
        (2, Chain, {"stages": nothing}),
        f"{GIVEN_BY}: `stages(module, 0, 2)` returned a `NoneType`. Return a `torch.nn.Module` made of the model's own"
        " submodules.",
    ),
    (
        (2, Ranked, {"split_at": ["1"]}),
        "`fabric.setup(...)`: rank 0 and rank 1 have unlike models: `0.weight` (float32 [4, 4]) and `0.weight` (float32"
        " [5, 4]). Make the same model on every rank.",
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize("number", range(len(SETUP_ERRORS)))
def test_what_cannot_be_set_up_says_so_on_every_rank(number):
    (ranks, model, arguments), text = SETUP_ERRORS[number]
    assert run_ranks(ranks, setup_error, model, arguments) == [text] * ranks


class Stepping(Net):
    def training_step(self, batch):
        return self(batch).mean()


def same(output, target):
    return output


def flat(output, target):
    return 1.0


def train_step(fabric, model, x, y, *, target=None, loss_fn=loss_of):
    return fabric.forward_backward(model, x, target=y if target is None else target, loss_fn=loss_fn)


def step_error(context, kind, arguments):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**arguments))
    model = fabric.setup(Stepping())
    x, y = batch(0)
    calls = {
        "odd batch": lambda: train_step(fabric, model, x[:7], y[:7]),
        "forward": lambda: model(x),
        "backward": lambda: fabric.backward(torch.zeros(1, requires_grad=True)),
        "method": lambda: model.training_step(x),
        "no scalar": lambda: train_step(fabric, model, x, y, loss_fn=same),
        "no tensor": lambda: train_step(fabric, model, x, y, loss_fn=flat),
        "assertion": lambda: train_step(fabric, model, torch.zeros(8, 7).long(), y),
        "unlike": lambda: train_step(fabric, model, x[:, : 6 - context.rank], y),
        "target": lambda: train_step(fabric, model, x, y[:6]),
        "too much": lambda: fabric.forward_backward(model, x, y, loss_fn=loss_of),
        "other stage": lambda: model.get_submodule("layers.0" if context.rank else "layers.0.up")(x.float()),
        "norm": lambda: clip_nan(fabric, model),
    }
    with pytest.raises((RuntimeError, ValueError)) as caught:
        calls[kind]()
    return str(caught.value)


def clip_nan(fabric, model):
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    x, y = batch(0)
    train_step(fabric, model, x, y)
    if fabric.global_rank == 1:
        model.head.bias.grad[0] = float("nan")
    assert fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isnan()
    fabric.clip_gradients(model, optimizer, max_norm=1.0)


TRAIN = "`loss = fabric.forward_backward(model, x, target=y, loss_fn=loss_fn)`"
STEP_ERRORS = {
    "odd batch": "`fabric.forward_backward(...)`: a batch of 7 can't be divided into 2 equal micro-batches"
    " (`num_microbatches`). Choose a batch size that is a multiple of it, and `drop_last=True` in the loader where the"
    " last batch is smaller.",
    "forward": "`Stepping` can't keep a graph for `backward` in a pipeline: forward and backward of its micro-batches"
    f" overlap. Train with {TRAIN}, and evaluate under `torch.no_grad()`.",
    "backward": "`fabric.backward(loss)` can't run under `PipelineParallelStrategy`, where forward and backward of"
    f" micro-batches overlap. Write {TRAIN} in the place of forward, loss and backward; it runs under every strategy.",
    "method": "`Stepping.training_step()` can't run in a pipeline, where each rank holds a part of the model. Train"
    " with `fabric.forward_backward(model, x, target=y, loss_fn=loss_fn)`, and evaluate with `model(x)` under"
    " `torch.no_grad()`.",
    "no scalar": "Stage 1 of the pipeline, on rank 1, failed with a micro-batch of [(int64 [4, 6],), {}, int64 [4, 6]]:"
    " TypeError: `loss_fn` has to return a tensor with one element, the mean over the batch that it is given, but"
    " returned float32 [4, 6, 11].",
    "no tensor": "Stage 1 of the pipeline, on rank 1, failed with a micro-batch of [(int64 [4, 6],), {}, int64 [4, 6]]:"
    " TypeError: `loss_fn` has to return a tensor with one element, the mean over the batch that it is given, but"
    " returned a `float`.",
    "assertion": "Stage 0 of the pipeline, on rank 0, failed with a micro-batch of [(int64 [4, 7],), {}, int64 [4, 6]]:"
    f" AssertionError: what line {inspect.getsourcelines(Net.forward)[1] + 2} of {__file__} checks does not hold",
    "unlike": "The ranks of a pipeline need the same batch, but rank 0 has [(int64 [4, 6],), {}, int64 [4, 6]] in a"
    " micro-batch and rank 1 has [(int64 [4, 5],), {}, int64 [4, 6]]. A loader from `fabric.setup_dataloaders(loader)`"
    " gives all of them the same.",
    "target": "`fabric.forward_backward(...)` divides each tensor along its first dimension into micro-batches, but got"
    " tensors of the shapes [8, 6], [6, 6]. Give all of them one entry for each sample; what is no tensor goes to every"
    " micro-batch as it is.",
    "too much": "Stage 0 of the pipeline, on rank 0, failed with a micro-batch of [(int64 [4, 6], int64 [4, 6]), {}]:"
    " TypeError: too many positional arguments",
    "norm": "The total norm of order 2.0 of the gradients is nan, so they can't be clipped. To scale them by it all the"
    " same, pass `error_if_nonfinite=False`.",
}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", STEP_ERRORS)
def test_what_cannot_run_says_so_on_every_rank(kind):
    assert run_ranks(2, step_error, kind, TWO) == [STEP_ERRORS[kind]] * 2


def nan_in_the_last_stage(context):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**TWO))
    model = fabric.setup(Net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan") if context.rank else 1.0)
    return [
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=p, error_if_nonfinite=False).item()
        for p in (2.0, float("inf"))
    ]


@pytest.mark.ranks
def test_no_norm_loses_a_nan_of_another_stage():
    assert repr(run_ranks(2, nan_in_the_last_stage)) == repr([[float("nan")] * 2] * 2)


def call_another_stage(context):
    model = context.fabric(strategy=PipelineParallelStrategy(**TWO)).setup(Net())
    with pytest.raises(RuntimeError) as caught:
        model.layers[5 if context.rank == 0 else 0](torch.zeros(2, WIDTH))
    with pytest.raises(AttributeError) as missing:
        model.layers[5 if context.rank == 0 else 0].up  # noqa: B018
    return str(caught.value), str(missing.value)


@pytest.mark.ranks
def test_a_stage_of_another_rank_says_where_it_is():
    text = (
        "`layers.5` (`Block`) is held by another rank of the pipeline. `fabric.explain()` shows which rank holds what."
    )
    assert run_ranks(2, call_another_stage)[0] == (text, f"No attribute `up`: {text}")


# ---------------------------------------------------------------------------------------------------------------------
# The rest
# ---------------------------------------------------------------------------------------------------------------------
def freeze_and_unfreeze(context):
    """The whole first stage is frozen for the first step."""
    fabric = context.fabric(strategy=PipelineParallelStrategy(**TWO))
    model = build(Case())[0]
    first = [name for name, _ in model.named_parameters() if name.startswith(("token", "position", *EARLY))]
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in first)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(2):
        x, y = batch(step)
        fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
        gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert gradients.isdisjoint(first) if step == 0 else gradients == set(dict(model.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(True)
    return model.state_dict()


EARLY = ("layers.0", "layers.1", "layers.2")


@pytest.mark.ranks
def test_a_stage_may_be_frozen_and_thaw_later():
    model = build(Case())[0]
    late = [p for name, p in model.named_parameters() if not name.startswith(("token", "position", *EARLY))]
    for step, parameters in enumerate((late, list(model.parameters()))):
        x, y = batch(step)
        loss_of(model(x), y).backward()
        torch.optim.SGD(parameters, lr=0.5).step()
        model.zero_grad()
    union = union_of(run_ranks(2, freeze_and_unfreeze))
    assert all(torch.allclose(union[name], value, atol=1e-6) for name, value in model.state_dict().items())


def overflow(context, arguments):
    """In the second step the gradients of the last stage are infinite, which the other stage must learn of."""
    fabric = context.fabric(strategy=PipelineParallelStrategy(**arguments), precision="16-mixed")
    model = build(Case())[0]
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    for step in range(3):
        x, y = batch(step)
        before = [parameter.clone() for parameter in model.parameters()]
        huge = 1e38 if step == 1 else 1.0
        fabric.forward_backward(
            model, x, target=y, loss_fn=lambda output, target, huge=huge: loss_of(output, target) * huge
        )
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(all(map(torch.equal, before, model.parameters())))
    return skipped, fabric.state_dict()["precision"]["scale"]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["1f1b", "interleaved 2x2"])
def test_the_loss_scaler_skips_a_step_on_all_stages(layout):
    ranks, arguments = LAYOUTS[layout]
    assert run_ranks(ranks, overflow, arguments) == [([False, True, False], 32768.0)] * ranks


def clip_infinite_norm(context):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**TWO))
    model, optimizer = fabric.setup(*build(Case(tied=True)))
    x, y = batch(0)
    fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
    norms = [fabric.clip_gradients(model, optimizer, max_norm=1e9, norm_type=p) for p in (float("inf"), 1.0, 3.0)]
    return torch.stack(norms)


@pytest.mark.ranks
def test_norms_of_any_order_are_those_of_the_whole_model():
    model, _ = build(Case(tied=True))
    x, y = batch(0)
    loss_of(model(x), y).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    expected = torch.stack([nn.utils.get_total_norm(gradients, p) for p in (float("inf"), 1.0, 3.0)])
    for norms in run_ranks(2, clip_infinite_norm):
        assert torch.allclose(norms, expected, rtol=1e-5)


def gradients_of_copies(context):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**LAYOUTS["gpipe 2x2"][1]))
    model = fabric.setup(build(Case())[0])
    x, y = (part.chunk(2)[fabric.strategy.data_parallel_rank] for part in batch(0))
    with fabric.no_backward_sync(model):
        fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
    own = next(model.parameters()).grad.clone()
    with fabric.no_backward_sync(model, enabled=False):
        fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
    return own, next(model.parameters()).grad, dict(fabric.strategy.distributed_sampler_kwargs)


@pytest.mark.ranks
def test_copies_average_gradients_unless_told_not_to():
    ranks = run_ranks(4, gradients_of_copies)
    for first in (0, 2):  # the ranks of one stage, with different data
        (own, joint, sampler), (other, same_joint, other_sampler) = ranks[first : first + 2]
        assert not torch.allclose(own, other)
        assert torch.equal(joint, same_joint)
        assert torch.allclose(joint, own + other, atol=1e-6)  # two steps, the mean over two copies
        assert (sampler, other_sampler) == ({"num_replicas": 2, "rank": 0}, {"num_replicas": 2, "rank": 1})


def compiled_whole(context):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**TWO))
    model = fabric.setup(torch.compile(Net(), backend="eager"))
    with pytest.raises(RuntimeError) as caught:
        fabric.forward_backward(model, batch(0)[0], target=batch(0)[1], loss_fn=loss_of)
    return str(caught.value)


@pytest.mark.ranks
def test_a_model_compiled_as_a_whole_is_refused():
    text = (
        "A model that was compiled as a whole can't run in a pipeline. Call `block.compile()` on its submodules before"
    )
    text += " `fabric.setup(...)`, and leave `torch.compile(model)` out."
    assert run_ranks(2, compiled_whole) == [text] * 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_one_process_and_the_same_call(precision):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer = fabric.setup(*build(Case()))
    expected = plain(Case(precision=precision, clipping="off"))
    for step, loss in enumerate(expected[0]):
        x, y = batch(step)
        got = fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
        assert not got.requires_grad
        assert got.item() == loss
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected[2].items())


def the_same_call(context, strategy):
    fabric = context.fabric(strategy=strategy)
    model, optimizer = fabric.setup(*build(Case()))
    losses, norms = [], []
    for step in range(STEPS):
        x, y = (part.chunk(2)[context.rank] for part in batch(step))
        losses.append(fabric.all_reduce(fabric.forward_backward(model, x, target=y, loss_fn=loss_of)).item())
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_same_call_under_other_strategies(strategy):
    losses, norms, _ = plain(Case())
    for got_losses, got_norms in run_ranks(2, the_same_call, strategy):
        assert got_losses == pytest.approx(losses, rel=1e-5)
        assert got_norms == pytest.approx(norms, rel=1e-4)


ARGUMENT_ERRORS = [
    (
        {},
        "`PipelineParallelStrategy` needs either `split_at=` or `stages=`, and got neither. Name the modules that begin"
        " a stage: `PipelineParallelStrategy(split_at=['layers.4'])`.",
    ),
    (
        {"split_at": ["a"], "stages": [["a"]]},
        "`PipelineParallelStrategy` needs either `split_at=` or `stages=`, and got"
        " both. Name the modules that begin a stage: `PipelineParallelStrategy(split_at=['layers.4'])`.",
    ),
    (
        {"split_at": "a"},
        "`PipelineParallelStrategy(split_at='a')` takes names of submodules, such as"
        " `split_at=['layers.4', 'layers.8']`.",
    ),
    (
        {"stages": ["a"]},
        "`PipelineParallelStrategy(stages=['a'])` takes the names of the submodules of each stage, such as"
        " `stages=[['token', 'layers.0'], ['layers.1', 'head']]`, or a function `(module, stage_index, num_stages)`.",
    ),
    (
        {"split_at": ["a"], "schedule": "1F1B"},
        "`PipelineParallelStrategy(schedule='1F1B')` is not a known schedule. Did"
        " you mean '1f1b'? Choose one of 'gpipe', '1f1b', 'interleaved_1f1b', 'looped_bfs', 'interleaved_zero_bubble',"
        " 'zbv_zero_bubble'.",
    ),
    (
        {"split_at": ["a"], "num_microbatches": 0},
        "`PipelineParallelStrategy(num_microbatches=0)` takes a number, 1 or more.",
    ),
    (
        {"split_at": ["a"], "stages_per_rank": 2},
        "`PipelineParallelStrategy(stages_per_rank=2)` is for `stages` that is a"
        " function; otherwise the number of stages says it. Leave it out.",
    ),
    (
        {"split_at": ["a"], "data_parallel_size": "auto"},
        "`PipelineParallelStrategy(pipeline_parallel_size='auto',"
        " data_parallel_size='auto')` leaves both sizes open. Give one of them as a number.",
    ),
    (
        {"split_at": ["a"], "state_dict_type": "whole"},
        "`PipelineParallelStrategy(state_dict_type='whole')` is not a"
        " layout of checkpoints. Choose one of 'full', 'sharded'.",
    ),
]


@pytest.mark.parametrize("number", range(len(ARGUMENT_ERRORS)))
def test_arguments_are_checked(number):
    arguments, text = ARGUMENT_ERRORS[number]
    with pytest.raises((TypeError, ValueError)) as caught:
        PipelineParallelStrategy(**arguments)
    assert str(caught.value) == text


def test_a_loss_scaler_that_knows_one_rank_only_is_refused():
    text = (
        "`PipelineParallelStrategy` can't run with `MixedPrecision('16-mixed')`, whose loss scaler knows one rank's"
        " gradients only. Write `Fabric(precision='16-mixed')`, which makes one that agrees over the stages."
    )
    strategy = PipelineParallelStrategy(**TWO)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=MixedPrecision("16-mixed", "cpu"))


def train_in_debug_mode(context):
    fabric = debugged(context, strategy=PipelineParallelStrategy(**LAYOUTS["1f1b 2x2"][1]))
    model, optimizer = fabric.setup(*build(Case()))
    for step in range(2):
        x, y = (part.chunk(2)[fabric.strategy.data_parallel_rank] for part in batch(step))
        loss = fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    return loss.item()


@pytest.mark.ranks
def test_debug_mode_has_nothing_to_say():
    losses = run_ranks(4, train_in_debug_mode)
    assert losses[0] == losses[2] != losses[1] == losses[3]


class Turn(nn.Module):
    """Its gradient is not contiguous where the input begins."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        assert x.is_contiguous()
        return self.linear(x.transpose(1, 2)).tanh()


def train_in_shapes(context, arguments):
    fabric = context.fabric(strategy=PipelineParallelStrategy(num_microbatches=2, **arguments), precision="bf16-mixed")
    torch.manual_seed(1)
    model = fabric.setup(nn.Sequential(Turn(), Turn(), Turn(), Turn()))
    dtypes = []

    def loss_and_dtype(output, target):
        dtypes.append(output.dtype)
        return F.mse_loss(output, target)

    losses = []
    for size in (4, 2, 4):
        x = torch.linspace(0, 1, size * 16).view(size, 4, 4)
        losses.append(fabric.forward_backward(model, x, target=x + 1, loss_fn=loss_and_dtype).item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}, set(dtypes)


IN_SHAPES = {
    "gpipe": {"split_at": ["2"], "schedule": "gpipe"},
    "interleaved_zero_bubble": {"split_at": ["1", "2", "3"], "schedule": "interleaved_zero_bubble"},
    "zbv_zero_bubble": {"split_at": ["1", "2", "3"], "schedule": "zbv_zero_bubble"},
}


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", IN_SHAPES)
def test_batches_of_another_shape_and_gradients_of_any_layout(schedule):
    torch.manual_seed(1)
    model = nn.Sequential(Turn(), Turn(), Turn(), Turn())
    losses = []
    for size in (4, 2, 4):
        x = torch.linspace(0, 1, size * 16).view(size, 4, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        losses.append(F.mse_loss(output.float(), x + 1))
        losses[-1].backward()
    ranks = run_ranks(2, train_in_shapes, IN_SHAPES[schedule])
    for got, _, dtypes in ranks:
        assert got == pytest.approx([loss.item() for loss in losses], rel=1e-2)
        assert dtypes in (set(), {torch.float32})
    assert any(dtypes for _, _, dtypes in ranks)
    union = union_of(gradients for _, gradients, _ in ranks)
    for name, parameter in model.named_parameters():
        assert (union[name] - parameter.grad).norm() < 3e-2 * parameter.grad.norm() + 1e-3, name


class Checkpointed(Block):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def train_with_changed_blocks(context):
    fabric = context.fabric(strategy=PipelineParallelStrategy(**TWO))
    model = build(Case())[0]
    for number in (1, 4):
        state = model.layers[number].state_dict()
        model.layers[number] = Checkpointed()
        model.layers[number].load_state_dict(state)
    called = []
    model.layers[2].compile(backend=lambda graph, inputs: called.append(graph) or graph.forward)
    model.layers[5].register_forward_hook(lambda *_: called.append("hook"))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    with warnings.catch_warnings():
        # PyTorch looks for it while it compiles a block whose input is no leaf, in plain code too.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
        for step in range(STEPS):
            x, y = batch(step)
            loss = fabric.forward_backward(model, x, target=y, loss_fn=loss_of)
            optimizer.step()
            optimizer.zero_grad()
    return loss, len(called)


@pytest.mark.ranks
def test_blocks_may_be_compiled_checkpointed_and_have_hooks():
    model = build(Case())[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (first, compiled), (second, hooked) = run_ranks(2, train_with_changed_blocks)
    assert torch.allclose(first, loss, atol=1e-5)
    assert torch.allclose(second, loss, atol=1e-5)
    assert compiled > 0
    assert hooked == 1 + 2 * STEPS  # once in the rehearsal, then for each of two micro-batches
