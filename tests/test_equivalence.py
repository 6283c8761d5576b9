# SPDX-License-Identifier: Apache-2.0
"""The equivalence contract: training under Fabric gives what plain PyTorch gives in one process on the joined batch.

Every strategy and world size x precision x accumulation x clipping. The plain loop below is written by hand and knows
nothing of Fabric. Ranks see different samples. One device is compared bit for bit, more by the table of tolerances.
"""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, PipelineParallelStrategy
from tests.ranks import RanksError, run_ranks
from tests.strategies.nets import whole

STEPS = 3
BATCH = 8  # samples of a global micro batch; every world size divides it
PRECISIONS = ("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
SETUPS = (
    *(("single", 1), ("ddp", 1), ("ddp", 2), ("ddp", 4)),
    *(("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp-2x2", 4)),
    *(("tensor", 2), ("tensor-fsdp-2x2", 4)),
    *(("context", 2), ("context", 4)),  # two parts of a batch; with four ranks two batches of half the size
    *(("pipeline", 2), ("pipeline-data-2x2", 4)),
)
# What is not a name of a strategy; made anew for each run.
STRATEGIES = {
    "hsdp-2x2": lambda: FSDPStrategy(device_mesh=(2, 2)),
    "context": lambda: ModelParallelStrategy(context_parallel_size=2),
    "tensor": lambda: ModelParallelStrategy(split_blocks),
    "tensor-fsdp-2x2": lambda: ModelParallelStrategy(split_blocks, tensor_parallel_size=2),
    "pipeline": lambda: PipelineParallelStrategy(split_at=["2"]),
    "pipeline-data-2x2": lambda: PipelineParallelStrategy(split_at=["2"], data_parallel_size=2),
}
ACCUMULATIONS = (1, 3)
CLIPPINGS = ("off", "norm", "value")
MAX_NORM, MAX_VALUE = 0.05, 0.005

# Relative errors. Half-precision gradients are averaged in that precision.
TOLERANCES = {
    "32-true": 2e-6,
    "64-true": 1e-14,
    "16-true": 8e-3,
    "bf16-true": 5e-2,
    "16-mixed": 4e-3,
    "bf16-mixed": 3e-2,
}


@pytest.fixture(autouse=True)
def _one_thread():
    """As on the ranks: the order of sums, and so the last bit, depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    precision: str
    accumulation: int
    clipping: str
    optimizer: str


@dataclass
class Run:
    """What one training run shows: a loss per micro batch, a norm per step where clipped, which steps were skipped."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


class Block(nn.Module):
    """What the strategies that shard or split a model find several times in it."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def split_blocks(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "1.up": ColwiseParallel(),
        "1.down": RowwiseParallel(),
        "2.up": ColwiseParallel(),
        "2.down": RowwiseParallel(),
    }
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def build(case):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), Block(), Block(), nn.Tanh(), nn.Linear(16, 3))
    if case.optimizer == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return model, torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-2)


def batch(case, step, micro):
    """The joined batch. With a loss scaler, one sample of the second step overflows: the last one, on the last rank."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(BATCH, 6, generator=generator)
    y = torch.randn(BATCH, 3, generator=generator) + x[:, :3]
    if case.precision == "16-mixed" and step == 1:
        y[-1] = 1e7
    return x, y


def loss_of(output, target):
    """Small enough for the loss scaler's first scale, on ranks too, whose means are over fewer samples."""
    return 0.1 * nn.functional.mse_loss(output, target.to(output.dtype))


def divided_loss(case, output, target):
    return loss_of(output, target) / case.accumulation


# ---------------------------------------------------------------------------------------------------------------------
# Plain PyTorch
# ---------------------------------------------------------------------------------------------------------------------
MODEL_DTYPES = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}
AUTOCAST_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def plain(case):
    model, optimizer = build(case)
    dtype = MODEL_DTYPES.get(case.precision, torch.float32)
    model.to(dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "16-mixed")
    autocast = nullcontext()
    if case.precision in AUTOCAST_DTYPES:
        autocast = torch.autocast("cpu", dtype=AUTOCAST_DTYPES[case.precision])
    run = Run()
    for step in range(STEPS):
        for micro in range(case.accumulation):
            x, y = batch(case, step, micro)
            with autocast:
                output = model(x.to(dtype))
            if output.dtype in (torch.float16, torch.bfloat16):
                output = output.float()
            loss = loss_of(output, y) / case.accumulation
            scaler.scale(loss).backward()
            run.losses.append(loss.item())
        if case.clipping != "off":
            scaler.unscale_(optimizer)
        if case.clipping == "norm":
            run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        elif case.clipping == "value":
            nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE)
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.skipped.append(torch.equal(before, model[0].weight))
    run.parameters = {name: value.clone() for name, value in model.state_dict().items()}
    return run


# ---------------------------------------------------------------------------------------------------------------------
# Fabric
# ---------------------------------------------------------------------------------------------------------------------
def train(fabric, case):
    model, optimizer = fabric.setup(*build(case))
    part = fabric.strategy.distributed_sampler_kwargs
    in_stages = fabric.strategy.state_is_distributed
    watched = list(model.parameters()) if in_stages else [model.module[0].weight]
    run = Run()
    for step in range(STEPS):
        for micro in range(case.accumulation):
            x, y = (tensor[part["rank"] :: part["num_replicas"]] for tensor in batch(case, step, micro))
            last = micro == case.accumulation - 1
            # Only attention tells a token from a sample, and this model has none.
            with fabric.no_backward_sync(model, enabled=not last), fabric.context_parallel((x, y), 0) as (x, y):
                if in_stages:  # they need forward and backward in one call
                    loss = fabric.forward_backward(model, x, target=y, loss_fn=partial(divided_loss, case))
                else:
                    loss = divided_loss(case, model(x), y)
                    fabric.backward(loss)
            run.losses.append(loss.item())
        if case.clipping == "norm":
            run.norms.append(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM).item())
        elif case.clipping == "value":
            fabric.clip_gradients(model, optimizer, clip_val=MAX_VALUE)
        before = [own_part(value) for value in watched]
        optimizer.step()
        optimizer.zero_grad()
        run.skipped.append(all(map(torch.equal, before, map(own_part, watched))))
    run.parameters = {name: whole(value) for name, value in model.state_dict().items()}
    if in_stages:
        run.parameters = joined(fabric.strategy.gather_objects(run.parameters))
    return run


def own_part(value):
    """What this rank has of a parameter."""
    value = value.detach()
    return (value.to_local() if isinstance(value, DTensor) else value).clone()


def joined(parts):
    """The parameters of all stages; copies of a stage have to be equal."""
    together = {}
    for name, value in (item for part in parts for item in part.items()):
        assert torch.equal(together.setdefault(name, value), value)
    return together


def train_all(context, strategy, precision, cases):
    """One world and its groups serve all cases of a precision; a loss scaler starts each one as it was new."""
    fabric = context.fabric(strategy=STRATEGIES.get(strategy, lambda: strategy)(), precision=precision)
    scale = fabric.strategy.precision.state_dict()
    found = []
    for case in cases:
        fabric.strategy.precision.load_state_dict(scale)
        found.append(train(fabric, case))
    return found


def optimizers_of(strategy, accumulation, clipping):
    """Both, but for what takes long on many ranks: there Adam, whose parameters can't be compared, trains once."""
    both = strategy in ("single", "ddp") or (accumulation, clipping) == (1, "norm")
    return ("sgd", "adam") if both else ("sgd",)


def cases_of(precision, strategy="single"):
    return [
        Case(precision, accumulation, clipping, optimizer)
        for accumulation, clipping in itertools.product(ACCUMULATIONS, CLIPPINGS)
        for optimizer in optimizers_of(strategy, accumulation, clipping)
    ]


@cache
def runs(strategy, world_size, precision):
    """For each case of this precision the run of each rank. One call on the ranks serves them all."""
    cases = cases_of(precision, strategy)
    if strategy == "single":
        fabrics = [Fabric(accelerator="cpu", devices=1, precision=precision) for _ in cases]
        return {case: [train(fabric, case)] for fabric, case in zip(fabrics, cases, strict=True)}
    try:
        ranks = run_ranks(world_size, train_all, strategy, precision, cases, timeout=180)
    except RanksError as error:  # kept like a result, so that one broken precision costs its time once
        return error
    return {case: [rank[index] for rank in ranks] for index, case in enumerate(cases)}


def run_of(strategy, world_size, case):
    found = runs(strategy, world_size, case.precision)
    if isinstance(found, RanksError):
        raise found
    return found[case]


@cache
def reference(case):
    return plain(case)


# ---------------------------------------------------------------------------------------------------------------------
# The matrix
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.ranks
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("strategy", "world_size"), SETUPS)
def test_training_equals_plain_pytorch(strategy, world_size, precision, accumulation, clipping):
    exact = world_size == 1 and strategy in ("single", "ddp")
    for optimizer in optimizers_of(strategy, accumulation, clipping):
        case = Case(precision, accumulation, clipping, optimizer)
        expected, ranks = reference(case), run_of(strategy, world_size, case)
        assert_same_on_all_ranks(ranks)
        losses = [sum(values) / world_size for values in zip(*(run.losses for run in ranks), strict=True)]
        assert_close(losses, expected.losses, precision, exact)
        assert_close(ranks[0].norms, expected.norms, precision, exact)
        assert ranks[0].skipped == expected.skipped
        if optimizer == "sgd" or exact:  # Adam turns noise around a gradient of zero into a whole step
            for name, value in expected.parameters.items():
                assert_close(ranks[0].parameters[name], value, precision, exact)


def assert_same_on_all_ranks(ranks):
    for run in ranks[1:]:
        assert repr(run.norms) == repr(ranks[0].norms)  # NaN included
        assert run.skipped == ranks[0].skipped
        for name, value in ranks[0].parameters.items():
            assert torch.equal(run.parameters[name], value)


def assert_close(actual, expected, precision, exact):
    """Numbers one by one; a tensor relative to its largest value, whose rounding its small ones carry."""
    if not isinstance(actual, torch.Tensor):
        for one, other in zip(actual, expected, strict=True):
            assert_close(torch.tensor(one, dtype=float), torch.tensor(other, dtype=float), precision, exact)
        return
    assert actual.dtype == expected.dtype
    if exact or not expected.isfinite().all():
        assert torch.equal(actual.nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30))
        return
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error <= TOLERANCES[precision], f"off by {error:.1e} of the largest value"


def test_the_matrix_tests_what_it_says():
    """The reference itself clips, skips the overflow and learns; without these the comparison would be empty."""
    for case in cases_of("32-true"):
        assert not any(reference(case).skipped)
        assert len(reference(case).norms) == (STEPS if case.clipping == "norm" else 0)
    for case in cases_of("16-mixed"):
        assert reference(case).skipped[1]
        assert not reference(case).skipped[2]
    norms = reference(Case("32-true", 1, "norm", "sgd")).norms
    assert max(norms) > MAX_NORM
    clipped, free = (reference(Case("32-true", 1, clipping, "sgd")).parameters for clipping in ("value", "off"))
    assert not torch.equal(clipped["0.weight"], free["0.weight"])
