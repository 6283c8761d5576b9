# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper and the user's optimizer always show the same values."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from fabric import Fabric, is_wrapped
from fabric.plugins.precision import Precision
from tests.ranks import run_ranks


class Recording(Precision):
    def __init__(self):
        self.steps = []

    def optimizer_step(self, optimizer, **kwargs):
        self.steps.append(optimizer)
        return super().optimizer_step(optimizer, **kwargs)


@pytest.fixture
def precision():
    return Recording()


@pytest.fixture
def fabric(precision):
    return Fabric(accelerator="cpu", devices=1, plugins=precision)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


@pytest.fixture
def plain(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def optimizer(fabric, net, plain):
    return fabric.setup(net, plain)[1]


def backward(net):
    net(torch.ones(1, 2)).sum().backward()


def test_isinstance_holds_for_optimizer_and_not_for_the_class(optimizer, plain):
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert not isinstance(optimizer, torch.optim.SGD)
    assert optimizer.optimizer is plain
    assert is_wrapped(optimizer)


def test_groups_state_and_defaults_are_the_very_same_objects(optimizer, plain, net):
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    assert optimizer.defaults is plain.defaults
    backward(net)
    optimizer.step()
    assert optimizer.state[net.weight]["momentum_buffer"] is plain.state[net.weight]["momentum_buffer"]


def test_attributes_forward_in_both_directions(optimizer, plain):
    plain.note = "set on the user's"
    assert optimizer.note == "set on the user's"
    optimizer.note = "set on the wrapper"
    assert plain.note == "set on the wrapper"
    assert "note" in dir(optimizer)
    del optimizer.note
    assert not hasattr(plain, "note")
    with pytest.raises(AttributeError, match=r"^'SGD' object has no attribute 'nothing'$"):
        optimizer.nothing  # noqa: B018


def test_replaced_groups_and_state_reach_the_users(optimizer, plain):
    groups = [dict(plain.param_groups[0])]
    optimizer.param_groups = groups
    assert plain.param_groups is groups
    optimizer.param_groups[0]["lr"] = 0.5
    assert plain.param_groups[0]["lr"] == 0.5


def test_methods_of_the_users_class_are_there(fabric, net):
    class Averaging(torch.optim.SGD):
        def average(self):
            return sum(group["lr"] for group in self.param_groups)

    assert fabric.setup(net, Averaging(net.parameters(), lr=0.25))[1].average() == 0.25


def test_add_param_group(optimizer, plain):
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra], "lr": 0.01})
    assert plain.param_groups[1]["params"] == [extra]
    assert plain.param_groups[1]["momentum"] == 0.9


def test_step_goes_through_the_precision_and_returns_the_loss(optimizer, plain, precision, net):
    backward(net)
    before = net.weight.detach().clone()
    assert optimizer.step() is None
    assert precision.steps == [plain]
    assert not torch.equal(net.weight, before)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    assert torch.is_tensor(optimizer.step(closure))
    assert torch.is_tensor(optimizer.step(closure=closure))
    assert precision.steps == [plain] * 3


def test_lbfgs_runs_its_closure(fabric):
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.LBFGS(net.parameters(), max_iter=5))
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) - 1).square().sum()
        fabric.backward(loss)
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(losses) > 1
    assert losses[-1] < losses[0]


def test_zero_grad(optimizer, net):
    backward(net)
    optimizer.zero_grad(set_to_none=False)
    assert net.weight.grad.abs().sum() == 0
    optimizer.zero_grad()
    assert net.weight.grad is None


def test_step_hooks_are_shared_and_run_once(optimizer, plain, net):
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("before", opt)))
    plain.register_step_post_hook(lambda opt, args, kwargs: calls.append(("after", opt)))
    backward(net)
    optimizer.step()
    assert calls == [("before", plain), ("after", plain)]


def test_state_dict_and_back(optimizer, plain, net):
    backward(net)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"] == plain.state_dict()["param_groups"]
    state["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(state)
    assert plain.param_groups[0]["lr"] == 0.7
    assert optimizer.param_groups is plain.param_groups


def test_state_dict_hooks_run(optimizer, plain):
    plain.register_state_dict_post_hook(lambda opt, state: {**state, "extra": 1})
    assert optimizer.state_dict()["extra"] == 1


def test_copies_are_plain_optimizers(optimizer, plain, net):
    backward(net)
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.SGD
        assert copied is not plain
        assert copied.param_groups[0]["lr"] == 0.1
        assert torch.equal(copied.param_groups[0]["params"][0], net.weight)
        assert len(copied.state) == 2


def test_deepcopied_together_a_model_and_its_optimizer_stay_together(fabric, net, plain):
    model, optimizer = fabric.setup(net, plain)
    copied_model, copied_optimizer = copy.deepcopy((model, optimizer))
    assert copied_optimizer.param_groups[0]["params"][0] is copied_model.weight


def test_repr_is_the_users(optimizer, plain):
    assert repr(optimizer) == repr(plain)


SCHEDULERS = {
    "StepLR": lambda o: StepLR(o, step_size=1, gamma=0.5),
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.5**step),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=10),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_made_before_or_after_setup_drives_the_same_optimizer(name, when, fabric, net, plain):
    """Also: PyTorch warns (an error here) when a scheduler does not see the optimizer's step."""
    scheduler = SCHEDULERS[name](plain) if when == "before" else None
    model, optimizer = fabric.setup(net, plain)
    scheduler = scheduler or SCHEDULERS[name](optimizer)
    reference = nn.Linear(2, 1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    expected_scheduler = SCHEDULERS[name](expected)
    for _ in range(3):
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        scheduler.step()
        expected.step()
        expected_scheduler.step()
        assert plain.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
        assert scheduler.get_last_lr() == expected_scheduler.get_last_lr()


@pytest.mark.parametrize("when", ["before", "after"])
def test_steps_go_through_the_precision_with_a_scheduler_too(when, fabric, precision, net, plain):
    if when == "before":
        StepLR(plain, step_size=1)
    model, optimizer = fabric.setup(net, plain)
    if when == "after":
        StepLR(optimizer, step_size=1)
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert precision.steps == [plain]
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD


def test_a_scheduler_on_a_metric(fabric, net, plain):
    _, optimizer = fabric.setup(net, plain)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for metric in (1.0, 2.0):
        scheduler.step(metric)
    assert plain.param_groups[0]["lr"] == 0.05


def test_the_loss_scaler_refuses_a_closure():
    fabric = Fabric(accelerator="cpu", devices=1, precision="16-mixed")
    net = nn.Linear(2, 1)
    _, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as caught:
        optimizer.step(lambda: None)
    assert str(caught.value) == (
        "`SGD.step(closure=...)` can't be combined with the loss scaler of `precision='16-mixed'`: a closure runs"
        " backward after the gradients were unscaled. Call `fabric.backward(loss)` yourself and step without a closure,"
        " or use 'bf16-mixed'."
    )


def ddp_optimizer(context):
    fabric = context.fabric()
    torch.manual_seed(context.rank)
    net = nn.Linear(2, 1)
    plain = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = StepLR(plain, step_size=1, gamma=0.5)
    model, optimizer = fabric.setup(net, plain)
    for _ in range(2):
        fabric.backward(model(torch.full((1, 2), float(context.rank))).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.025  # stepped once a step, not once a process
    return [p.detach() for p in net.parameters()], optimizer.state_dict()


@pytest.mark.ranks
def test_under_ddp_an_optimizer_made_before_setup_trains_what_ddp_synchronises():
    (first, state), (second, other) = run_ranks(2, ddp_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert state["param_groups"] == other["param_groups"]
    assert all(torch.equal(state["state"][i]["exp_avg"], other["state"][i]["exp_avg"]) for i in (0, 1))
