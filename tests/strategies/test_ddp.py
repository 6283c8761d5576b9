# SPDX-License-Identifier: Apache-2.0
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from fabric import Fabric
from fabric.strategies import DDPStrategy, ParallelStrategy
from tests.ranks import run_ranks


class _Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(4, 2)
        self.unused = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)


def _step(fabric, model, x):
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(model(x).square().mean())
        optimizer.step()
    return model


def _train(context, options):
    fabric = context.fabric(strategy=DDPStrategy(**options))
    torch.manual_seed(context.rank)  # rank 0's parameters win
    model = _step(fabric, torch.nn.Linear(4, 2), torch.full((2, 4), float(context.rank)))
    return [parameter.detach() for parameter in model.parameters()]


def _by_hand(ranks=2):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.cat([torch.full((2, 4), float(rank)) for rank in range(ranks)])
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-6),
        ({"gradient_as_bucket_view": True}, 1e-6),
        ({"static_graph": True}, 1e-6),
        ({"bucket_cap_mb": 1, "broadcast_buffers": False, "timeout": timedelta(seconds=60)}, 1e-6),
        ({"process_group_backend": "gloo"}, 1e-6),
        ({"ddp_comm_hook": default_hooks.fp16_compress_hook}, 1e-3),
        (
            {"ddp_comm_hook": default_hooks.allreduce_hook, "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper},
            1e-3,
        ),
    ],
    ids=lambda value: "-".join(value) or "defaults" if isinstance(value, dict) else "",
)
def test_options_train_as_one_process(options, tolerance):
    for parameters in run_ranks(2, _train, options):
        for ours, theirs in zip(parameters, _by_hand(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


def _power_sgd(context):
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2)
    fabric = context.fabric(strategy=DDPStrategy(ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=state))
    _step(fabric, torch.nn.Linear(4, 2), torch.ones(2, 4))
    return state.iter


@pytest.mark.ranks
def test_a_hook_gets_its_state():
    assert all(iterations > 0 for iterations in run_ranks(2, _power_sgd))


def test_a_state_without_a_hook_raises():
    text = (
        "`DDPStrategy(ddp_comm_state=..., ddp_comm_wrapper=...)` belong to a hook, but there is none."
        " Pass `ddp_comm_hook=` too."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        DDPStrategy(ddp_comm_state=object())


def _unused(context):
    fabric = context.fabric(strategy="ddp_find_unused_parameters_true")
    model = _step(fabric, _Branches(), torch.ones(2, 4))
    return model.unused.weight.grad is None or not model.unused.weight.grad.any()


@pytest.mark.ranks
def test_unused_parameters():
    assert run_ranks(2, _unused) == [True, True]


def _frozen(context):
    fabric = context.fabric(strategy="ddp")
    torch.manual_seed(context.rank)
    teacher = torch.nn.BatchNorm1d(2).requires_grad_(False)
    torch.nn.init.normal_(teacher.weight)
    teacher = fabric.setup(teacher)
    assert not isinstance(teacher._forward_module, DistributedDataParallel)
    with fabric.no_backward_sync(teacher):
        teacher(torch.ones(2, 2))
    return teacher.weight.tolist()


@pytest.mark.ranks
def test_a_module_with_nothing_to_train_is_not_wrapped_but_equal_on_all_ranks():
    torch.manual_seed(0)
    expected = torch.nn.init.normal_(torch.empty(2)).tolist()
    assert run_ranks(2, _frozen) == [expected, expected]


def _no_sync(context):
    fabric = context.fabric(strategy="ddp")
    model = fabric.setup(torch.nn.Linear(1, 1, bias=False))

    def gradient(block):
        model.zero_grad()
        with block:
            fabric.backward(model(torch.full((1, 1), float(context.rank))).sum())
        return model.weight.grad.item()

    def fail():
        with fabric.no_backward_sync(model):
            raise KeyError("x")

    seen = [gradient(fabric.no_backward_sync(model)), gradient(fabric.no_backward_sync(model, enabled=False))]
    with pytest.raises(KeyError):
        fail()
    with fabric.no_backward_sync(model), fabric.no_backward_sync(model):
        pass
    seen.append(gradient(fabric.no_backward_sync(model, enabled=False)))
    return seen


@pytest.mark.ranks
def test_no_backward_sync_is_over_after_it():
    assert run_ranks(2, _no_sync) == [[0.0, 0.5, 0.5], [1.0, 0.5, 0.5]]


def _setup_with(context, hooked_rank):
    """Set up a module whose parameter has a gradient, and on one rank a hook, and take one step."""
    fabric = context.fabric(strategy=DDPStrategy())
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.full((1, 2), float(context.rank))
    calls = []
    if context.rank == hooked_rank:
        module.weight.register_post_accumulate_grad_hook(calls.append)
    model = fabric.setup(module)
    after_setup = len(calls), module.weight.grad.tolist()
    model.zero_grad()
    fabric.backward(model(torch.ones(1, 2)).sum())
    return after_setup, len(calls), module.weight.grad.tolist()


@pytest.mark.parametrize("hooked_rank", [None, 1])
def test_buckets_are_settled_without_a_trace(hooked_rank):
    for rank, result in enumerate(run_ranks(3, _setup_with, hooked_rank)):
        assert result == ((0, [[float(rank)] * 2]), int(rank == hooked_rank), [[1.0, 1.0]])


def _teardown(context):
    fabric = context.fabric(strategy="ddp")
    assert dist.is_initialized()
    fabric.teardown()
    return dist.is_initialized()


@pytest.mark.ranks
def test_teardown_leaves_the_process_group():
    assert run_ranks(2, _teardown) == [False, False]


def _model_that_outlives_teardown(context):
    fabric = context.fabric(strategy="ddp")
    model = fabric.setup(torch.nn.Linear(1, 1))
    if context.rank == 1:
        time.sleep(0.3)  # so that rank 0 still waits for this when its model goes
    dist.all_reduce(torch.ones(1), async_op=True)
    fabric.teardown()
    del model


@pytest.mark.ranks
def test_a_model_may_outlive_teardown_while_a_collective_is_under_way():
    run_ranks(2, _model_that_outlives_teardown, timeout=20)


def _uneven_batches(rank):
    return [torch.full((2, 4), float(rank + step)) for step in range(2 + 3 * rank)]


def _join_by_hand(context):
    context.process_group()
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for batch in _uneven_batches(context.rank):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _join(context):
    fabric = context.fabric(strategy="ddp")
    model = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    frozen = fabric.setup(torch.nn.Linear(4, 4).requires_grad_(False))
    with fabric.join_uneven_inputs(model, frozen):
        for batch in _uneven_batches(context.rank):
            optimizer.zero_grad()
            fabric.backward(model(batch).square().mean())
            optimizer.step()
    fabric.barrier()
    with fabric.join_uneven_inputs(frozen):
        pass
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.ranks
def test_uneven_inputs_train_as_with_join_by_hand():
    expected, results = run_ranks(2, _join_by_hand)[0], run_ranks(2, _join)
    for parameters in results:
        assert all(map(torch.equal, parameters, expected))
    assert all(map(torch.equal, *run_ranks(1, _one_rank_twice)[0]))


def _one_rank_twice(context):
    first = _join(context)
    torch.manual_seed(0)
    return first, _by_loop(_uneven_batches(0))


def _by_loop(batches):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class _NoJoin(ParallelStrategy):
    """A strategy of its own, which does not synchronise in a backward that could be joined."""


def _refused(context):
    fabric = context.fabric(strategy=_NoJoin())
    model = fabric.setup(torch.nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="needs `strategy='ddp'`") as raised:
        fabric.join_uneven_inputs(model)
    return str(raised.value)


@pytest.mark.ranks
def test_other_strategies_refuse_uneven_inputs_on_every_rank():
    text = (
        "`fabric.join_uneven_inputs(...)` needs `strategy='ddp'`, and this run uses `_NoJoin`. Let all ranks take the"
        " same number of batches: a loader from `fabric.setup_dataloaders(loader, uneven='pad')` does."
    )
    assert run_ranks(2, _refused) == [text, text]


def test_one_process_has_nothing_to_join():
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(torch.nn.Linear(4, 2))
    with fabric.join_uneven_inputs(model):
        fabric.backward(model(torch.ones(1, 4)).sum())
    text = "`fabric.join_uneven_inputs(*modules)` takes a module that `fabric.setup(...)` returned, but got `Linear`."
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        fabric.join_uneven_inputs(model.module)
