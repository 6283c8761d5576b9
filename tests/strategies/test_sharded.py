# SPDX-License-Identifier: Apache-2.0
"""What all strategies share that shard parameters: optimizers, wrappers, scalers, clipping. Tested under FSDP."""

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fabric.plugins.precision import FSDPPrecision, MixedPrecision
from fabric.strategies import FSDPStrategy
from tests.ranks import run_ranks
from tests.strategies.test_fsdp import Block, Net, batch, whole, whole_state

pytestmark = pytest.mark.ranks


def step(model, optimizer, data, backward=torch.Tensor.backward):
    x, y = data
    loss = F.mse_loss(model(x), y)
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def mine(context, data):
    return [tensor[context.rank :: context.world_size] for tensor in data]


def assert_same_state(ours, theirs, tolerance=2e-5):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)


# Optimizers


def adam(model, **options):
    """Its epsilon keeps the noise around a gradient of zero small."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, **options)


def trained_before(context, options):
    """Stepped once before the setup, on the same data everywhere; a scheduler made before drives it after."""
    fabric = context.fabric(strategy="fsdp")
    model = Net()
    optimizer = adam(model, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step(model, optimizer, batch(0))
    groups, whole_ones = optimizer.param_groups, list(model.parameters())
    model, wrapped = fabric.setup(model, optimizer)
    assert optimizer.param_groups is groups
    assert not any(parameter.numel() for parameter in whole_ones)  # their memory is free, whoever still holds them
    assert fabric.strategy.parameter_names(optimizer) == [[name for name, _ in model.named_parameters()]]
    kinds = {key: type(value) for key, value in optimizer.state[model.first.weight].items()}
    assert kinds == {"step": torch.Tensor, "exp_avg": DTensor, "exp_avg_sq": DTensor}
    for number in (1, 2):
        scheduler.step()
        step(model, wrapped, mine(context, batch(number)), fabric.backward)
    return whole_state(model), {name: whole(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["", "foreach", "fused"])
def test_an_optimizer_that_has_stepped_before_goes_on(options):
    model = Net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number in range(3):
        if number:
            scheduler.step()
        step(model, optimizer, batch(number))
    averages = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    for parameters, ours in run_ranks(2, trained_before, options):
        assert_same_state(parameters, model.state_dict())
        assert_same_state(ours, averages)


def made_at(context, moment):
    """An optimizer made after setup, at moments at which the root shows shards or what was gathered."""
    fabric = context.fabric(strategy=FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"))
    model = fabric.setup(Net())
    loss = None
    if moment == "after evaluation":
        with torch.no_grad():
            model(batch(7)[0])
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    if moment == "after inference":
        with torch.inference_mode():
            model(batch(7)[0])
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    if moment == "before backward":
        x, y = mine(context, batch(0))
        loss = F.mse_loss(model(x), y)
    optimizer = fabric.setup_optimizers(adam(model))
    if loss is None:
        step(model, optimizer, mine(context, batch(0)), fabric.backward)
    else:
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    step(model, optimizer, mine(context, batch(1)), fabric.backward)
    return whole_state(model)


@pytest.mark.parametrize("moment", ["at once", "after evaluation", "after inference", "before backward"])
def test_an_optimizer_made_after_setup(moment):
    model = Net()
    optimizer = adam(model)
    for number in range(2):
        step(model, optimizer, batch(number))
    for state in run_ranks(2, made_at, moment):
        assert_same_state(state, model.state_dict())


def two_models(context):
    """As in a GAN: two models, two optimizers; and a third model that is only evaluated."""
    fabric = context.fabric(strategy="fsdp")
    one, two, teacher = Net(), Net(), fabric.setup(Net().requires_grad_(False))
    one, first = fabric.setup(one, adam(one))
    two, second = fabric.setup(two, adam(two))
    for number in range(3):
        x, y = mine(context, batch(number))
        fabric.backward(F.mse_loss(two(x) + one(x), y + teacher(x)))
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    empty = fabric.setup(nn.Sequential(nn.Flatten(), nn.Tanh()))
    assert torch.equal(empty(torch.ones(2, 3, 4)), torch.ones(2, 12).tanh())
    return whole_state(one), whole_state(two), fabric.strategy.parameter_names(second.optimizer)[0][0]


def test_several_models():
    one, two, teacher = Net(), Net(), Net().requires_grad_(False)
    optimizers = adam(one), adam(two)
    for number in range(3):
        x, y = batch(number)
        F.mse_loss(two(x) + one(x), y + teacher(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours_one, ours_two, name in run_ranks(2, two_models):
        assert_same_state(ours_one, one.state_dict())
        assert_same_state(ours_two, two.state_dict())
        assert name == "2.first.weight"


def some_ignored(context):
    """Parameters that the user keeps out of it stay plain, and count once in a norm."""
    model = Net()
    fabric = context.fabric(strategy=FSDPStrategy(ignored_params={model.first.weight, model.first.bias}))
    joint = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with pytest.raises(ValueError, match="updates the parameters of a group together") as error:
        fabric.setup(model, joint)
    model = Net()
    fabric = context.fabric(strategy=FSDPStrategy(ignored_params={model.first.weight, model.first.bias}))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(0)  # the same on all ranks: nobody averages the gradients of what is ignored
    fabric.backward(F.mse_loss(model(x), y))
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
    optimizer.step()
    return str(error.value), norm, whole_state(model), type(model.first.weight)


def test_ignored_parameters():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(0)
    F.mse_loss(model(x), y).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    for text, norm, state, kind in run_ranks(2, some_ignored):
        assert text == (
            "`SGD(foreach=True)` updates the parameters of a group together, but some of them are sharded and some are"
            " not. Leave `foreach` out, or put these into two groups."
        )
        torch.testing.assert_close(norm, expected)
        assert_same_state(state, model.state_dict())
        assert kind is nn.Parameter


# What the user sees of the model


def wrapper(context):
    fabric = context.fabric(strategy="fsdp")
    net, called = Net(), []
    net.register_forward_hook(lambda module, args, output: called.append(type(module)))
    plain = fabric.to_device(nn.Linear(2, 2))
    model = fabric.setup(net)
    texts = []
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError) as error:
            copied(model)
        texts.append(str(error.value))
    x, y = mine(context, batch(0))
    loss = model.training_step(x, y)
    fabric.backward(loss)
    gradient = whole(model.last.weight.grad)
    assert called == [Net]
    assert type(net) is Net
    assert isinstance(model.blocks[0], Block)
    assert type(plain.weight) is nn.Parameter
    return texts, fabric.all_reduce(loss.detach()), gradient, [name for name, _ in model.named_parameters()]


def test_the_wrapper():
    net = Net()
    loss = net.training_step(*batch(0))
    loss.backward()
    for texts, ours, gradient, names in run_ranks(2, wrapper):
        assert texts == [
            f"`{call}`: this rank holds only a part of `Net`, which `FSDPStrategy` has divided. Save it by"
            " `fabric.save(path, {'model': model})` on all ranks and load that into a model that is made anew."
            for call in ("copy.deepcopy(model)", "pickle.dumps(model)")
        ]
        torch.testing.assert_close(ours, loss.detach())
        torch.testing.assert_close(gradient, net.last.weight.grad)
        assert names == [name for name, _ in net.named_parameters()]


def unmarked(context):
    """Raises without gradients too, where layers would be given shards, and leaves the model as it is."""
    fabric = context.fabric(strategy="fsdp")
    model = fabric.setup(Net())
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"Mark it once after setup: `model\.mark_forward_method\('embed'\)`"):
            model.embed(batch(0)[0])
        model.mark_forward_method("embed")
        return model.embed(batch(0)[0])


def test_methods_that_are_not_marked():
    net = Net()
    for embedded in run_ranks(2, unmarked):
        torch.testing.assert_close(embedded, net.embed(batch(0)[0]).detach())


def hooked(context):
    """Hooks on parameters run, on shards, or raise."""
    fabric = context.fabric(strategy="fsdp")
    texts, calls = [], []
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        net = Net()
        getattr(net.last.weight, name)(calls.append)
        with pytest.raises(ValueError, match="has a hook") as error:
            fabric.setup(net)
        texts.append(str(error.value))
    model = fabric.setup(Net())
    model.last.weight.register_post_accumulate_grad_hook(lambda shard: calls.append(whole(shard.grad)))
    x, y = mine(context, batch(0))
    fabric.backward(F.mse_loss(model(x), y))
    return texts, calls


def test_hooks_on_parameters():
    net = Net()
    x, y = batch(0)
    F.mse_loss(net(x), y).backward()
    for texts, calls in run_ranks(2, hooked):
        assert (
            texts
            == [
                "`fabric.setup(...)`: the parameter `last.weight` of `Net` has a hook, which would never be called:"
                " sharding puts another parameter in its place. Register it on the model that `setup` returns, with"
                " `register_post_accumulate_grad_hook`; it is given the shard and its gradient."
            ]
            * 2
        )
        torch.testing.assert_close(calls, [net.last.weight.grad])


def dropped(context):
    """A model that was trained leaves no shards in memory."""
    fabric = context.fabric(strategy="fsdp")
    model = Net()
    model, optimizer = fabric.setup(model, adam(model))
    step(model, optimizer, mine(context, batch(0)), fabric.backward)
    shards = [weakref.ref(parameter.to_local().untyped_storage()) for parameter in model.parameters()]
    del model, optimizer
    for _ in range(2):  # a unit is a cycle of its own, which is left when that of the whole model is gone
        gc.collect()
    return [shard() is None for shard in shards]


def test_a_trained_model_that_is_dropped():
    for gone in run_ranks(2, dropped):
        assert all(gone)


def averaged(model, average, data, backward):
    """Trains a model towards an average of it, which follows; the average's forward does not say `no_grad`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        x, y = data(batch(number))
        backward(F.mse_loss(model(x), y) + F.mse_loss(model(x), average(x)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return whole_state(average)


def follow(context):
    fabric = context.fabric(strategy=FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"))
    model, average = fabric.setup(Net()), fabric.setup(Net().requires_grad_(False))
    return averaged(model, average, partial(mine, context), partial(fabric.backward, model=model))


def test_a_model_that_follows_another():
    expected = averaged(Net(), Net().requires_grad_(False), lambda data: data, torch.Tensor.backward)
    for state in run_ranks(2, follow):
        assert_same_state(state, expected)


class Failing(Net):
    fails = ""

    def forward(self, x):
        if self.fails == "forward":
            self.blocks[0](self.first(x))
            raise KeyError("on purpose")
        output = super().forward(x)
        if self.fails == "backward":
            output.register_hook(_fail)
        return output


def _fail(gradient):
    raise KeyError("on purpose")


def after_errors(context):
    fabric = context.fabric(strategy="fsdp")
    model = Failing()
    model, optimizer = fabric.setup(model, adam(model))
    for number, fails in enumerate(("forward", "backward", "")):
        model.fails = fails
        with pytest.raises(KeyError) if fails else nullcontext():
            step(model, optimizer, mine(context, batch(number)), fabric.backward)
        optimizer.zero_grad()
    return whole_state(model)


def after_an_error_of_a_compiled_model(context):
    """A backward that is told the compiled model forgets the step as well: nothing stays gathered."""
    fabric = context.fabric(strategy=FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"))
    model = fabric.setup(torch.compile(Net(), backend="eager"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
        output = model(batch(0)[0])
    output.register_hook(_fail)
    assert not isinstance(model.last.weight, DTensor)
    with pytest.raises(KeyError):
        fabric.backward(output.sum(), model=model)
    return [isinstance(parameter, DTensor) for parameter in model.parameters()]


def test_an_error_of_a_compiled_model():
    for shards in run_ranks(2, after_an_error_of_a_compiled_model, timeout=120):
        assert all(shards)


def test_a_step_after_an_error():
    model = Net()
    step(model, adam(model), batch(2))
    for state in run_ranks(2, after_errors):
        assert_same_state(state, model.state_dict())


# Accumulation


def unsynced(context, how, mesh):
    """After what it leaves, by an error too, gradients are synchronised again."""
    fabric = context.fabric(strategy=FSDPStrategy(accumulation=how, device_mesh=mesh))
    model = fabric.setup(Net())

    def accumulate(number):
        x, y = mine(context, batch(number))
        fabric.backward(F.mse_loss(model(x), y))

    with pytest.raises(KeyError), fabric.no_backward_sync(model):
        raise KeyError
    with fabric.no_backward_sync(model):
        with fabric.no_backward_sync(model):
            accumulate(0)
        with fabric.no_backward_sync(model, enabled=False):
            accumulate(1)
        accumulate(2)
    accumulate(3)
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("how", "mesh"), [("unsharded", None), ("sharded", None), ("unsharded", (2, 2)), ("sharded", (2, 2))]
)
def test_blocks_without_synchronisation_nest(how, mesh):
    model = Net()
    for number in range(4):
        x, y = batch(number)
        F.mse_loss(model(x), y).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradients in run_ranks(4 if mesh else 2, unsynced, how, mesh):
        assert_same_state(gradients, expected)


def discarded(context, how, mesh, precision, reset):
    """What was accumulated and then reset, in one case after an error, is no part of the next gradient."""
    fabric = context.fabric(strategy=FSDPStrategy(accumulation=how, device_mesh=mesh), precision=precision)
    net = Net()
    others = torch.optim.SGD([p for name, p in net.named_parameters() if "first" not in name])
    model, others = fabric.setup(net, others)
    losses = [F.mse_loss(model(x), y) for x, y in (mine(context, batch(number)) for number in range(2))]
    with fabric.no_backward_sync(model):
        fabric.backward(losses[0])
    {"optimizer": others, "model": model}[reset].zero_grad()
    fabric.backward(losses[1])
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("how", "mesh", "precision", "reset"),
    [
        ("unsharded", None, "32-true", "optimizer"),
        ("unsharded", None, "bf16-mixed", "optimizer"),
        ("sharded", (2, 2), "32-true", "optimizer"),
        ("sharded", (2, 2), "32-true", "model"),
    ],
)
def test_accumulated_gradients_that_are_reset(how, mesh, precision, reset):
    model = Net()
    x, y = batch(0)
    if reset == "optimizer":
        F.mse_loss(model(x), y).backward()
    model.blocks.zero_grad(), model.norm.zero_grad(), model.last.zero_grad()
    x, y = batch(1)
    F.mse_loss(model(x), y).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradients in run_ranks(4 if mesh else 2, discarded, how, mesh, precision, reset):
        assert_same_state(gradients, expected, 2e-5 if precision == "32-true" else 2e-2)


# Clipping


def infinite(context):
    """One rank's gradients are infinite: all raise, or none."""
    fabric = context.fabric(strategy="fsdp")
    model = Net()
    model, optimizer = fabric.setup(model, adam(model))
    fabric.backward(model(batch(0)[0]).sum())
    if context.rank == 1:
        model.last.weight.grad.to_local().fill_(float("nan"))
    found = [
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=p, error_if_nonfinite=False) for p in (2, 1)
    ]
    found.append(
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=float("inf"), error_if_nonfinite=False)
    )
    with pytest.raises(RuntimeError) as error:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(ValueError, match=r"^`norm_type=0\.0` is not positive"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=0)
    return [bool(norm.isnan()) for norm in found], str(error.value)


def test_a_norm_that_is_not_finite():
    text = (
        "The total norm of order 2.0 of the gradients is nan, so they can't be clipped. To scale them by it all the"
        " same, pass `error_if_nonfinite=False`."
    )
    assert run_ranks(2, infinite) == [([True, True, True], text)] * 2


# Loss scalers


def scaled(context, make_plugin, options):
    """The last rank alone overflows, in the gradients of one of two models; then goes on."""
    fabric = context.fabric(strategy=FSDPStrategy(auto_wrap_policy={Block}), plugins=make_plugin())
    one, two = Net(), Net()
    one, first = fabric.setup(one, adam(one, **options))
    two, second = fabric.setup(two, adam(two, **options))
    changed, norms, scales = [], [], []
    for number in range(3):
        x, y = mine(context, batch(number))
        factor = 1e6 if number == 1 and context.rank == context.world_size - 1 else 1.0
        before = whole(one.last.weight), whole(two.last.weight)
        fabric.backward(F.mse_loss(one(x), y) + factor * F.mse_loss(two(x), y))
        norms.append(fabric.clip_gradients(one, first, max_norm=1.0).isfinite().item())
        norms.append(fabric.clip_gradients(two, second, max_norm=1.0).isfinite().item())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        changed.append([not torch.equal(b, whole(m.last.weight)) for b, m in zip(before, (one, two), strict=True)])
        scales.append(fabric.precision.state_dict()["scale"])
    for _ in range(2):
        fabric.backward(F.mse_loss(one(x), y))
        fabric.clip_gradients(one, first, max_norm=1.0)
        first.zero_grad()  # given up: no step follows
    return changed, norms, scales, fabric.precision.state_dict(), whole_state(one)


def _fsdp_scaler():
    return FSDPPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))


PLUGINS = {
    "ours": partial(FSDPPrecision, "16-mixed", "cpu"),
    "with a scaler": _fsdp_scaler,
    "plain": partial(MixedPrecision, "16-mixed", "cpu"),
}


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["", "fused"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_one_rank_that_overflows(plugin, options):
    ranks = run_ranks(2, scaled, PLUGINS[plugin], options)
    changed, norms, scales, state, _ = ranks[0]
    assert changed == [[True, True], [True, False], [True, True]]
    assert norms == [True, True, True, False, True, True]
    assert scales[1] == scales[0] / 2 == scales[2]
    assert state["scale"] == scales[2]
    assert repr(ranks[1][:4]) == repr(ranks[0][:4])


# A mesh of the user's own


def own_mesh(context, shape):
    context.process_group()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("machines", "devices")[-len(shape) :])
    fabric = context.fabric(strategy=FSDPStrategy(device_mesh=mesh))
    assert fabric.strategy.device_mesh is mesh
    model = Net()
    model, optimizer = fabric.setup(model, adam(model))
    step(model, optimizer, mine(context, batch(0)), fabric.backward)
    return whole_state(model), fabric.strategy.replica_ranks, fabric.strategy.setup_rows()[1][1]


@pytest.mark.parametrize(("shape", "replicas", "row"), [((2,), 1, "2 ranks"), ((2, 1), 2, "1 rank, 2 copies")])
def test_a_mesh_of_ones_own(shape, replicas, row):
    model = Net()
    step(model, adam(model), batch(0))
    for state, ranks, text in run_ranks(2, own_mesh, shape):
        assert_same_state(state, model.state_dict())
        assert len(ranks) == replicas
        assert text == row


# Debug mode


def debugged(context, mesh):
    fabric = context.fabric(strategy=FSDPStrategy(device_mesh=mesh))
    model = Net()
    model, optimizer = fabric.setup(model, adam(model))
    for number in range(3):
        with fabric.no_backward_sync(model):
            x, y = mine(context, batch(number))
            fabric.backward(F.mse_loss(model(x), y))
        step(model, optimizer, mine(context, batch(number)), fabric.backward)
    with torch.no_grad():
        model(x)
    ranks = fabric.strategy.replica_ranks
    fabric.teardown()
    return ranks


@pytest.mark.parametrize(("mesh", "replicas"), [((2,), [(0,), (1,)]), ((2, 2), [(0, 2), (1, 3), (0, 2), (1, 3)])])
def test_debug_mode(mesh, replicas):
    assert run_ranks(len(replicas), in_debug_mode, debugged, mesh) == replicas


def in_debug_mode(context, function, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FABRIC_DEBUG", "1")
        return function(context, *args)
