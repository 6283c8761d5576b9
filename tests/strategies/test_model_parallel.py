# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel, alone and with sharding and copies, against plain PyTorch in one process on the joined batch."""

import os
import pickle
import re
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tests.ranks import run_ranks
from tests.strategies.nets import (
    Block,
    Net,
    batch,
    loss_of,
    net,
    split_and_shard,
    split_and_shard_blocks,
    split_layers,
    split_sequence,
    split_vocabulary,
    whole,
)

pytestmark = pytest.mark.ranks
STEPS, MAX_NORM = 3, 0.3
TOLERANCE = 1e-12  # of the largest value, in float64: ranks add up in another order


@pytest.fixture(autouse=True)
def _one_thread():
    """As on the ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    accumulation: int = 1
    clipping: str = "norm"
    optimizer: str = "sgd"
    tied: bool = False
    options: dict = field(default_factory=dict)

    def build(self):
        model = net(self.tied)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD
        options = {"eps": 1e-3} if self.optimizer == "adam" else {"momentum": 0.9}
        return model, kind(model.parameters(), lr=0.1, **options, **self.options)


@dataclass
class Run:
    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    parameters: dict = field(default_factory=dict)


def plain(case):
    model, optimizer = case.build()
    model.double()
    run = Run()
    for step in range(STEPS):
        for micro in range(case.accumulation):
            words = batch(step, micro)
            loss = loss_of(model(words), words) / case.accumulation
            loss.backward()
            run.losses.append(loss.item())
        if case.clipping == "norm":
            run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = dict(model.state_dict())
    return run


def train(fabric, case):
    rank, size = fabric.strategy.data_parallel_rank, fabric.strategy.data_parallel_size
    model, optimizer = fabric.setup(*case.build())
    run = Run()
    for step in range(STEPS):
        for micro in range(case.accumulation):
            words = batch(step, micro)[rank::size]
            with fabric.no_backward_sync(model, enabled=micro < case.accumulation - 1):
                loss = loss_of(model(words), words) / case.accumulation
                fabric.backward(loss)
            run.losses.append(fabric.all_reduce(loss.detach()).item())
        if case.clipping == "norm":
            run.norms.append(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM).item())
        else:
            fabric.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {name: whole(value) for name, value in model.state_dict().items()}
    return run


CASES = (
    Case(),
    Case(accumulation=3, clipping="value"),
    Case(optimizer="adam"),
)


def train_all(context, options, cases):
    found = []
    for case in cases:
        strategy = ModelParallelStrategy(**options)
        found.append(train(context.fabric(strategy=strategy, precision="64-true"), case))
    return found


def assert_equal(run, expected):
    for one, other in ((run.losses, expected.losses), (run.norms, expected.norms)):
        assert_close(torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))
    assert list(run.parameters) == list(expected.parameters)
    for name, value in expected.parameters.items():
        assert_close(run.parameters[name], value)


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if expected.numel():
        assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


def assert_equals_plain(ranks, cases):
    for number, case in enumerate(cases):
        expected = plain(case)
        for runs in ranks:
            assert_equal(runs[number], expected)
            assert runs[number].norms == ranks[0][number].norms


@pytest.mark.parametrize("function", [split_layers, split_sequence])
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (1, {}),
        (2, {}),
        (4, {"tensor_parallel_size": 2}),
        (4, {"tensor_parallel_size": 2, "replicate_size": 2}),
    ],
    ids=["one process", "tensor", "tensor and sharded", "tensor and copies"],
)
def test_training_equals_plain_pytorch(world_size, sizes, function):
    ranks = run_ranks(world_size, train_all, {"parallelize_fn": function, **sizes}, CASES)
    assert_equals_plain(ranks, CASES)


# what the mesh and the user's function may be


def threads_left(context):
    """The number of threads beyond those of before, while a model and its mesh live on after `teardown`."""
    before = len(os.listdir("/proc/self/task"))
    fabric = context.fabric(strategy=ModelParallelStrategy(split_sequence, tensor_parallel_size=2))
    model, _ = fabric.setup(*Case().build())
    words = batch(0)
    fabric.backward(loss_of(model(words), words))
    mesh, during = fabric.strategy.device_mesh, len(os.listdir("/proc/self/task"))
    fabric.teardown()
    return during - before, len(os.listdir("/proc/self/task")) - before, mesh.ndim


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux shows them")
def test_the_groups_of_the_mesh_end_with_teardown():
    for during, after, _ in run_ranks(4, threads_left):
        assert during - after >= 6  # three groups, each with two threads


def two_meshes(context):
    """Both have a tensor group of ranks 0 and 1, of process groups that come one after the other."""
    found = []
    for sizes in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "replicate_size": 2}):
        fabric = context.fabric(strategy=ModelParallelStrategy(split_sequence, **sizes), precision="64-true")
        found.append(train(fabric, CASES[0]))
        fabric.teardown()
    return found


def test_a_second_group_in_the_same_process_is_not_taken_for_the_first():
    assert_equals_plain(run_ranks(4, two_meshes), [CASES[0]] * 2)


@pytest.mark.parametrize("function", [split_and_shard, split_and_shard_blocks])
def test_a_function_that_shards_too(function):
    cases = [Case(), Case(accumulation=2)]
    ranks = run_ranks(4, train_all, {"parallelize_fn": function, "tensor_parallel_size": 2}, cases)
    assert_equals_plain(ranks, cases)


def step_by_methods(context, function):
    """A marked method, an evaluation and an error in between leave everything in order."""
    from torch.distributed.tensor import DTensor

    fabric = context.fabric(strategy=ModelParallelStrategy(function, tensor_parallel_size=2), precision="64-true")
    model, optimizer = fabric.setup(*Case().build())
    words = batch(0)[fabric.strategy.data_parallel_rank :: 2]
    with torch.no_grad():
        loss_of(model(words), words)
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    with pytest.raises(TypeError):
        model.training_step(words, "no number")
    loss = model.training_step(words, 2.0)
    fabric.backward(loss)
    optimizer.step()
    return kinds, fabric.all_reduce(loss.detach()).item(), {n: whole(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("function", [split_layers, split_and_shard, split_and_shard_blocks])
def test_marked_methods_and_evaluation(function):
    model, optimizer = Case().build()
    loss = model.double().training_step(batch(0), 2.0)
    loss.backward()
    optimizer.step()
    for kinds, value, parameters in run_ranks(4, step_by_methods, function):
        assert kinds == {True}
        assert_close(torch.tensor(value, dtype=torch.float64), loss.detach())
        for name, parameter in model.named_parameters():
            assert_close(parameters[name], parameter.detach())


# one way to break each rule


def returns_nothing(module, mesh):
    split_layers(module, mesh)


def returns_another(module, mesh):
    return nn.Sequential(split_layers(module, mesh))


def splits_nothing(module, mesh):
    return module


def splits_the_embedding_only(module, mesh):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    return parallelize_module(module, mesh["tensor_parallel"], plan)


def errors_of_setup(context):
    found = []
    for function, tied in (
        (returns_nothing, False),
        (returns_another, False),
        (splits_nothing, False),
        (splits_the_embedding_only, True),
    ):
        fabric = context.fabric(strategy=ModelParallelStrategy(function))
        with pytest.raises((ValueError, TypeError)) as caught:
            fabric.setup(net(tied))
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    fabric = context.fabric(strategy=ModelParallelStrategy(split_and_shard, cpu_offload=True))
    with pytest.raises(ValueError, match="fully_shard") as caught:
        fabric.setup(net())
    found.append(str(caught.value))
    fabric = context.fabric(strategy=ModelParallelStrategy(split_layers))
    model = fabric.setup(net())
    with pytest.raises(RuntimeError) as caught:
        context.fabric(strategy=ModelParallelStrategy(split_layers)).setup(model.module)
    return [*found, str(caught.value)]


def test_errors_of_setup_come_on_every_rank():
    in_place = (
        "TypeError: `ModelParallelStrategy(parallelize_fn=...)` has to change `Net` in place and return it, but it"
        " returned {}. End it with `return module`; compile a model, or put it into another one, before `fabric.setup`."
    )
    expected = [
        in_place.format("None"),
        in_place.format("another object, of type `Sequential`"),
        "ValueError: `ModelParallelStrategy(parallelize_fn=...)` split no parameter of `Net` over the 2 ranks of"
        " `device_mesh['tensor_parallel']`. Name its layers in the plan, as `model.named_modules()` does, or set up a"
        " model that is split before one that is not.",
        "ValueError: `embedding.weight` and `head.weight` of `Net` are one parameter, but `parallelize_fn` split them"
        " in two ways: `(Shard(dim=0),)`, and not at all. Give both modules styles that split alike, such as"
        " `RowwiseParallel()` for an `Embedding` and `ColwiseParallel()` for the `Linear` with the same weight.",
        "`ModelParallelStrategy(cpu_offload=...)` says how to shard `Net`, but `parallelize_fn` has applied"
        " `fully_shard` to it. Leave `cpu_offload` out, or leave `fully_shard` to the strategy.",
        "`fabric.setup(...)`: `Net` is sharded already, `blocks.0.up.weight` for example. Set up each module once, as"
        " you made it, and leave `fully_shard` to the strategy; with `ModelParallelStrategy(parallelize_fn=...)` you"
        " can call it yourself.",
    ]
    assert run_ranks(2, errors_of_setup) == [expected, expected]


def error_of_sizes(context):
    with pytest.raises(ValueError, match="multiply") as caught:
        context.fabric(strategy=ModelParallelStrategy(split_layers, data_parallel_size=2, tensor_parallel_size=3))
    return str(caught.value), torch.distributed.is_initialized()


def test_sizes_that_do_not_fit_raise_before_any_process_meets_another():
    text = (
        "`ModelParallelStrategy`: replicate_size=1 * data_parallel_size=2 * context_parallel_size=1 *"
        " tensor_parallel_size=3 can't be divided over 2 processes: the sizes multiply to 6. Make them multiply to 2,"
        " or leave one of them 'auto'."
    )
    assert run_ranks(2, error_of_sizes) == [(text, False)] * 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            {"tensor_parallel_size": 2},
            "`ModelParallelStrategy(tensor_parallel_size=2)` needs to know how to split the layers. Pass"
            " `parallelize_fn=` too: a function of the model and the mesh that calls"
            " `torch.distributed.tensor.parallel.parallelize_module`.",
        ),
        (
            {"parallelize_fn": "colwise"},
            "`ModelParallelStrategy(parallelize_fn='colwise')` is not a function. Pass one that is given the model and"
            " the mesh, splits the model's layers and returns it.",
        ),
        (
            {"data_parallel_size": 0},
            "`ModelParallelStrategy(data_parallel_size=0)` is not a number of ranks. Write 1 or more, or 'auto'.",
        ),
        (
            {"replicate_size": "auto"},
            "`ModelParallelStrategy(replicate_size='auto')` is not a number of ranks. Write 1 or more.",
        ),
    ],
)
def test_errors_of_the_constructor(arguments, error):
    with pytest.raises((ValueError, TypeError)) as caught:
        ModelParallelStrategy(**arguments)
    assert str(caught.value) == error


def test_the_mesh_exists_after_launch():
    strategy = ModelParallelStrategy(split_layers)
    with pytest.raises(RuntimeError) as caught:
        _ = strategy.device_mesh
    assert str(caught.value) == ("`ModelParallelStrategy.device_mesh` is made by `fabric.launch()`. Call that first.")


# parameters and optimizers


def test_optimizers_whose_kernels_take_all_parameters_at_once():
    cases = [Case(optimizer="adam", options={"fused": True}), Case(optimizer="adam", options={"foreach": True})]
    ranks = run_ranks(4, train_all, {"parallelize_fn": split_layers, "tensor_parallel_size": 2}, cases)
    assert_equals_plain(ranks, cases)


def refused_kernel(context):
    fabric = context.fabric(strategy=ModelParallelStrategy(split_layers))
    with pytest.raises(ValueError, match="together") as caught:
        fabric.setup(*Case(options={"foreach": True}).build())
    return str(caught.value)


def test_kernels_that_do_not_take_split_and_whole_parameters():
    text = (
        "`SGD(foreach=True)` updates the parameters of a group together, but some of them are sharded and some are not."
        " Leave `foreach` out, or put these into two groups."
    )
    assert run_ranks(2, refused_kernel) == [text, text]


def test_tied_weights_and_recomputed_activations():
    cases = [Case(tied=True), Case(tied=True, accumulation=2, optimizer="adam")]
    options = {"parallelize_fn": split_sequence, "tensor_parallel_size": 2, "activation_checkpointing_policy": {Block}}
    for world_size in (2, 4):
        assert_equals_plain(run_ranks(world_size, train_all, options, cases), cases)


def go_on(context):
    """An optimizer that has stepped keeps its state, and ranks with other weights begin with those of rank 0."""
    model, optimizer = Case(optimizer="adam").build()
    model.double()
    for step in range(2):
        words = batch(step)
        loss_of(model(words), words).backward()
        optimizer.step()
        optimizer.zero_grad()
    if context.rank:
        nn.init.normal_(model.embedding.weight)
    fabric = context.fabric(strategy=ModelParallelStrategy(split_layers, tensor_parallel_size=2), precision="64-true")
    model, optimizer = fabric.setup(model, optimizer)
    words = batch(2)[fabric.strategy.data_parallel_rank :: fabric.strategy.data_parallel_size]
    fabric.backward(loss_of(model(words), words))
    optimizer.step()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_optimizer_that_has_stepped_before(world_size):
    model, optimizer = Case(optimizer="adam").build()
    model.double()
    for step in range(3):
        words = batch(step)
        loss_of(model(words), words).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in run_ranks(world_size, go_on):
        for name, parameter in model.named_parameters():
            assert_close(parameters[name], parameter.detach())


def train_the_rest(context):
    """Half of the model is frozen; the optimizer has all of it."""
    strategy = ModelParallelStrategy(split_sequence, tensor_parallel_size=2)
    fabric = context.fabric(strategy=strategy, precision="64-true")
    model, optimizer = Case().build()
    model.blocks[0].requires_grad_(False)
    model, optimizer = fabric.setup(model, optimizer)
    words = batch(0)[strategy.data_parallel_rank :: strategy.data_parallel_size]
    fabric.backward(loss_of(model(words), words))
    norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
    optimizer.step()
    return norm, {name: (p.requires_grad, whole(p)) for name, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_frozen_parameters(world_size):
    model, optimizer = Case().build()
    model.double().blocks[0].requires_grad_(False)
    loss_of(model(batch(0)), batch(0)).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    for norm, parameters in run_ranks(world_size, train_the_rest):
        assert_close(norm, expected)
        for name, parameter in model.named_parameters():
            assert parameters[name][0] == parameter.requires_grad
            assert_close(parameters[name][1], parameter.detach())


def start_on_meta(context, options):
    fabric = context.fabric(strategy=ModelParallelStrategy(split_sequence, **options))
    torch.manual_seed(1)
    with fabric.init_module(empty_init=True):
        model = Net()
    assert all(parameter.is_meta for parameter in model.parameters())
    model = fabric.setup(model)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}, fabric.explain()


@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (4, {"tensor_parallel_size": 2})])
def test_a_model_that_starts_on_the_meta_device(world_size, options):
    expected = dict(net().named_parameters())
    for parameters, explained in run_ranks(world_size, start_on_meta, options):
        assert list(parameters) == list(expected)
        for name, parameter in expected.items():
            assert torch.equal(parameters[name], parameter.detach())
        assert ["split", "Net: 16 of 16 parameters, over 2 ranks", "parallelize_fn"] in rows(explained)
        sharded = ["sharded", "Net: 2 x Block of 296 + 208 others", "auto: fills `blocks`"]
        assert (sharded in rows(explained)) == (world_size == 4)


def rows(table):
    return [re.split(r" {2,}", line) for line in table.splitlines()]


# losses that stay split


def train_on_split_logits(context, precision):
    from torch.distributed.tensor.parallel import loss_parallel

    fabric = context.fabric(
        strategy=ModelParallelStrategy(split_vocabulary, tensor_parallel_size=2), precision=precision
    )
    rank, size = fabric.strategy.data_parallel_rank, fabric.strategy.data_parallel_size
    model, optimizer = fabric.setup(*Case().build())
    run = Run()
    for step in range(STEPS):
        words = batch(step)[rank::size]
        with loss_parallel():
            loss = loss_of(model(words), words)
            fabric.backward(loss)
        run.losses.append(fabric.all_reduce(loss.detach()).item())
        run.norms.append(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {name: whole(value) for name, value in model.state_dict().items()}
    return run


@pytest.mark.parametrize("world_size", [2, 4])
def test_loss_parallel(world_size):
    expected = plain(Case())
    for run in run_ranks(world_size, train_on_split_logits, "64-true"):
        assert_equal(run, expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_loss_parallel_in_half_precision(precision):
    expected = plain(Case())
    for run in run_ranks(2, train_on_split_logits, precision):
        assert run.losses == pytest.approx(expected.losses, rel=2e-2)
        assert run.norms == pytest.approx(expected.norms, rel=5e-2)


def report_split_losses(context):
    """Mean losses and predictions of a loader's last batch, where they are `DTensor`s."""
    from torch.distributed.tensor.parallel import loss_parallel

    fabric = context.fabric(
        strategy=ModelParallelStrategy(split_vocabulary, tensor_parallel_size=2), precision="64-true"
    )
    model = fabric.setup(net())
    loader = fabric.setup_dataloaders(DataLoader(batch(0), batch_size=2))
    (words, *_) = loader
    with torch.no_grad(), loss_parallel():
        logits = model(words)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flip(1).flatten(), reduction="sum")
    mean = fabric.weighted_mean(loss, words.numel())
    return mean, fabric.gather_for_metrics((words, logits), loader)


def test_what_is_reported_of_split_losses():
    for mean, (words, logits) in run_ranks(4, report_split_losses):
        assert sorted(words.tolist()) == sorted(batch(0).tolist())
        assert_close(logits, net().double()(words).detach())
        assert_close(mean, loss_of(logits, words))


# data


def count_samples(context):
    """What metrics see, under tensor parallel with two parts of the data, the last of which is filled up."""
    fabric = context.fabric(strategy=ModelParallelStrategy(split_layers, tensor_parallel_size=2))
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(9), batch_size=2))
    seen, total, count = [], 0.0, 0
    for numbers in loader:
        gathered = fabric.gather_for_metrics(numbers, loader)
        seen += gathered.tolist()
        valid = numbers[: loader.share.valid]
        total, count = total + valid.sum(), count + len(valid)
    windows = []
    for window in fabric.accumulate(loader, 2, count="samples"):
        windows.append(window.total.item())
    mean = fabric.weighted_mean(total, count).item()
    return (
        sorted(seen),
        mean,
        windows,
        fabric.all_reduce(torch.tensor(float(fabric.strategy.data_parallel_rank))).item(),
    )


def test_each_sample_counts_once():
    for seen, mean, windows, reduced in run_ranks(4, count_samples):
        assert seen == list(range(9))
        assert mean == 4.0
        assert windows == [8.0, 1.0]
        assert reduced == 0.5


def accumulate_by_tokens(context):
    fabric = context.fabric(strategy=ModelParallelStrategy(split_sequence, tensor_parallel_size=2), precision="64-true")
    model, optimizer = fabric.setup(*Case().build())
    loader = fabric.setup_dataloaders(DataLoader(batch(0, size=6), batch_size=1))
    for window in fabric.accumulate(loader, 3, count="samples"):
        for words in window:
            with fabric.no_backward_sync(model, enabled=not window.is_last):
                losses = torch.stack([loss_of(model(words)[i : i + 1], words[i : i + 1]) for i in range(len(words))])
                fabric.backward(window.mean(losses))
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def test_accumulation_over_samples():
    model, optimizer = Case().build()
    words = batch(0, size=6)
    loss_of(model.double()(words), words).backward()
    optimizer.step()
    for parameters in run_ranks(4, accumulate_by_tokens):
        for name, parameter in model.named_parameters():
            assert_close(parameters[name], parameter.detach())


# state


def step_of(fabric, model, optimizer, step):
    part = fabric.strategy.distributed_sampler_kwargs
    words = batch(step)[part["rank"] :: part["num_replicas"]]
    fabric.backward(loss_of(model(words), words))
    optimizer.step()
    optimizer.zero_grad()


def go_on_from(fabric, path):
    """Load a model and an optimizer that have taken one step, and take the second one."""
    model, optimizer = fabric.setup(*Case(optimizer="adam").build())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 1
    step_of(fabric, model, optimizer, 1)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def save_and_load(context, function, layout, options, plain_file):
    """What each way of loading comes to after the second step."""
    strategy = ModelParallelStrategy(function, state_dict_type=layout, **options)
    fabric = context.fabric(strategy=strategy, precision="64-true")
    torch.save(plain_file, f"plain-{context.rank}")
    model, optimizer = fabric.setup(*Case(optimizer="adam").build())
    step_of(fabric, model, optimizer, 0)
    fabric.save("checkpoint", {"model": model, "optimizer": optimizer, "step": 1})
    found = [go_on_from(fabric, "checkpoint"), go_on_from(fabric, f"plain-{context.rank}")]
    others = context.fabric(strategy=FSDPStrategy(), precision="64-true")
    found.append(go_on_from(others, "checkpoint"))
    return found, torch.load("checkpoint") if layout == "full" else None


@pytest.mark.parametrize("layout", ["full", "sharded"])
@pytest.mark.parametrize(
    ("function", "world_size", "options"),
    [
        (split_sequence, 4, {"tensor_parallel_size": 2}),
        (split_layers, 4, {"tensor_parallel_size": 2, "replicate_size": 2}),
        (split_and_shard, 4, {"tensor_parallel_size": 2}),
    ],
)
def test_checkpoints_move_between_strategies(function, world_size, options, layout):
    model, optimizer = Case(optimizer="adam").build()
    model.double()
    for step in range(2):
        loss_of(model(batch(step)), batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
            plain_file = pickle.loads(pickle.dumps(saved))
    for ways, full in run_ranks(world_size, save_and_load, function, layout, options, plain_file):
        for parameters in ways:
            for name, parameter in model.named_parameters():
                assert_close(parameters[name], parameter.detach())
        if full is not None:  # an ordinary file, whose names and order are the plain model's
            assert list(full["model"]) == list(plain_file["model"])
            _, plain_optimizer = Case(optimizer="adam").build()
            plain_optimizer.load_state_dict(full["optimizer"])
            for number, entries in plain_file["optimizer"]["state"].items():
                assert_close(full["optimizer"]["state"][number]["exp_avg"], entries["exp_avg"])
