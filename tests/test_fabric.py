# SPDX-License-Identifier: Apache-2.0
"""The public surface of `Fabric`, in this process and on real ranks."""

import contextlib
import gc
import io
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fabric as package
from fabric import Fabric
from fabric.loggers import Logger
from fabric.plugins.precision import MixedPrecision
from fabric.strategies import DDPStrategy, SingleDeviceStrategy
from tests.ranks import run_ranks


def one(**kwargs):
    return Fabric(accelerator="cpu", devices=1, **kwargs)


def linear_and_sgd(**kwargs):
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, **kwargs)


def raises(error, text):
    """Expect an error with exactly this text."""
    return pytest.raises(error, match=f"^{re.escape(text)}$")


# --------------------------------------------------------------------------------------------------------------------
# Who am I
# --------------------------------------------------------------------------------------------------------------------
def test_properties_in_one_process():
    fabric = one()
    assert fabric.device == torch.device("cpu")
    assert (fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size) == (0, 0, 0, 1)
    assert fabric.is_global_zero
    assert fabric.is_local_zero
    assert isinstance(fabric.strategy, SingleDeviceStrategy)
    assert fabric.accelerator is fabric.plan.accelerator.value
    assert fabric.precision is fabric.plan.precision.value
    assert fabric.loggers == []
    assert repr(fabric) == fabric.plan.summary()
    assert "\n" not in repr(fabric)
    assert fabric.explain() == fabric.plan.explain()


def test_a_logger_that_is_not_there():
    with raises(RuntimeError, "`fabric.logger`: there is no logger. Pass one: `Fabric(loggers=CSVLogger('logs'))`."):
        one().logger  # noqa: B018


def test_the_constructor_takes_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        Fabric("cpu")


def test_the_package_exports_what_programs_import():
    assert package.Fabric is Fabric
    assert set(package.__all__) == {"Fabric", "seed_everything", "is_wrapped", "__version__"}
    assert all(hasattr(package, name) for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=r"^module `fabric` has no attribute `nothing`$"):
        package.nothing  # noqa: B018


# --------------------------------------------------------------------------------------------------------------------
# Start
# --------------------------------------------------------------------------------------------------------------------
def test_launch_passes_fabric_first_and_returns_the_result():
    fabric = one()
    assert fabric.launch(lambda first, a, b: (first is fabric, a, b), 1, b=2) == (True, 1, 2)


def test_launch_again_does_not_launch_again():
    fabric = one()
    assert fabric.launch() is None
    assert fabric.launch() is None
    assert fabric.launch(lambda first: first) is fabric


def test_launch_takes_a_function():
    text = "`fabric.launch('train')` takes a function, to be called as `function(fabric, *args)` on every rank."
    with raises(TypeError, text):
        one().launch("train")


def test_one_process_launches_by_itself():
    fabric = one()
    fabric.setup(nn.Linear(1, 1))
    assert fabric.broadcast(3) == 3


NEEDS_LAUNCH = {
    "setup": lambda f: f.setup(nn.Linear(1, 1)),
    "setup_module": lambda f: f.setup_module(nn.Linear(1, 1)),
    "setup_optimizers": lambda f: f.setup_optimizers(linear_and_sgd()[1]),
    "setup_dataloaders": lambda f: f.setup_dataloaders(DataLoader([1])),
    "init_module": lambda f: f.init_module().__enter__(),
    "init_tensor": lambda f: f.init_tensor().__enter__(),
    "to_device": lambda f: f.to_device(torch.ones(1)),
    "barrier": lambda f: f.barrier(),
    "broadcast": lambda f: f.broadcast(1),
    "all_gather": lambda f: f.all_gather(torch.ones(1)),
    "all_reduce": lambda f: f.all_reduce(torch.ones(1)),
    "rank_zero_first": lambda f: f.rank_zero_first().__enter__(),
    "gather_for_metrics": lambda f: f.gather_for_metrics(torch.ones(1), DataLoader([1])),
    "weighted_mean": lambda f: f.weighted_mean(1, 1),
    "any_rank": lambda f: f.any_rank(True),
    "all_ranks": lambda f: f.all_ranks(True),
    "join_uneven_inputs": lambda f: f.join_uneven_inputs(nn.Linear(1, 1)),
    "accumulate": lambda f: f.accumulate(DataLoader([1]), 2),
    "save": lambda f: f.save("file", {}),
    "load": lambda f: f.load("file"),
    "load_raw": lambda f: f.load_raw("file", nn.Linear(1, 1)),
    "state_dict": lambda f: f.state_dict(),
    "load_state_dict": lambda f: f.load_state_dict({}),
}


@pytest.mark.parametrize("call", NEEDS_LAUNCH)
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_what_needs_the_processes_says_to_launch_them(call, strategy):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    with raises(
        RuntimeError,
        f"`fabric.{call}(...)` needs the 2 processes of this run, and they are not started yet."
        " Call `fabric.launch()` before it.",
    ):
        NEEDS_LAUNCH[call](fabric)


@pytest.mark.parametrize(("strategy", "way"), [("ddp_spawn", "spawn"), ("ddp_fork", "fork"), ("ddp_notebook", "fork")])
def test_strategies_that_start_new_processes_need_a_function(strategy, way):
    text = (
        f"`fabric.launch()` starts new processes by {way} for `strategy='{strategy}'`, which need a function to run."
        " Put the loop into one and call `fabric.launch(function)`."
    )
    with raises(TypeError, text):
        Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()


def test_an_overridden_run_launches():
    class Trainer(Fabric):
        def run(self, a, *, b):
            """What it does."""
            return self._launched, a, b

    assert Trainer(accelerator="cpu", devices=1).run(1, b=2) == (True, 1, 2)
    assert Trainer.run.__doc__ == "What it does."
    assert Trainer.run.__name__ == "run"


def test_run_is_wrapped_once_in_a_line_of_subclasses():
    calls = []

    class Base(Fabric):
        def run(self):
            calls.append("base")
            return 1

    class Derived(Base):
        def run(self):
            calls.append("derived")
            return super().run() + 1

    class Further(Derived):
        pass

    assert Further(accelerator="cpu", devices=1).run() == 2
    assert calls == ["derived", "base"]


def test_run_that_nobody_defined():
    text = "`Fabric.run()` is not defined. Override it in a subclass of `Fabric`, or use `launch()`."
    with raises(NotImplementedError, text):
        one().run()


def test_two_objects_in_one_process_share_nothing():
    first, second = one(precision="bf16-mixed"), one()
    first.setup(nn.Linear(1, 1))
    assert second.precision.precision == "32-true"
    assert first.strategy is not second.strategy
    assert not second._set_up


def test_teardown_twice_and_before_launch():
    fabric = one()
    fabric.teardown()
    fabric.launch()
    fabric.teardown()
    fabric.teardown()


def test_a_strategy_given_twice_belongs_to_one_fabric_only():
    strategy = SingleDeviceStrategy()
    fabric = one(strategy=strategy)
    assert fabric.strategy is strategy


# --------------------------------------------------------------------------------------------------------------------
# Set up
# --------------------------------------------------------------------------------------------------------------------
def test_setup_returns_the_model_or_all_that_was_given():
    fabric = one()
    model = fabric.setup(nn.Linear(1, 1))
    assert isinstance(model, nn.Module)
    net, first = linear_and_sgd()
    second = torch.optim.Adam(net.parameters())
    model, *optimizers = fabric.setup(net, first, second)
    assert [o.optimizer for o in optimizers] == [first, second]
    net, plain = linear_and_sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    _, _, returned = fabric.setup(net, plain, scheduler=scheduler)
    assert returned is scheduler


def test_setup_optimizers_returns_one_or_a_tuple():
    fabric = one()
    net, plain = linear_and_sgd()
    fabric.setup_module(net)
    assert fabric.setup_optimizers(plain).optimizer is plain
    first, _ = fabric.setup_optimizers(torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters()))
    assert isinstance(first.optimizer, torch.optim.Adam)


WRONG_SETUPS = {
    "module twice": (
        ValueError,
        lambda f: f.setup(f.setup(nn.Linear(1, 1))),
        "This module was set up before. `fabric.setup(model, ...)` takes each module once, as you made it.",
    ),
    "no module": (
        TypeError,
        lambda f: f.setup("model"),
        "`fabric.setup(module, *optimizers)` takes a `torch.nn.Module` first, but got `str`.",
    ),
    "optimizer twice": (
        ValueError,
        lambda f: f.setup_optimizers(f.setup_optimizers(linear_and_sgd()[1])),
        "This optimizer was set up before. Each optimizer is set up once, as you made it.",
    ),
    "list of optimizers": (
        TypeError,
        lambda f: f.setup(linear_and_sgd()[0], [linear_and_sgd()[1]]),
        "Optimizers are passed one by one, not as a list."
        " Write `fabric.setup(model, *optimizers)` or `fabric.setup_optimizers(*optimizers)`.",
    ),
    "scheduler as optimizer": (
        TypeError,
        lambda f: f.setup(nn.Linear(1, 1), torch.optim.lr_scheduler.StepLR(linear_and_sgd()[1], 1)),
        "An optimizer must be a `torch.optim.Optimizer`, but got `StepLR`."
        " A learning-rate scheduler needs no setup, or goes into `fabric.setup(..., scheduler=...)`.",
    ),
    "no optimizer": (
        ValueError,
        lambda f: f.setup_optimizers(),
        "`fabric.setup_optimizers(*optimizers)` takes at least one optimizer.",
    ),
    "meta parameters": (
        RuntimeError,
        lambda f: f.setup(nn.Linear(1, 1, device="meta")),
        "`fabric.setup(...)`: `Linear` has 2 parameters on the meta device, the first is `weight`. Create it under"
        " `fabric.init_module()`, or materialise it with `module.to_empty(device=...)` and load its weights first.",
    ),
    "no loader": (
        ValueError,
        lambda f: f.setup_dataloaders(),
        "`fabric.setup_dataloaders(*dataloaders)` takes at least one data loader.",
    ),
    "not a loader": (
        TypeError,
        lambda f: f.setup_dataloaders(3),
        "`fabric.setup_dataloaders(...)` takes data loaders or other iterables over batches, but got `int`. Pass a"
        " `torch.utils.data.DataLoader`.",
    ),
    "list of loaders": (
        TypeError,
        lambda f: f.setup_dataloaders([DataLoader([1])]),
        "`fabric.setup_dataloaders(...)` takes data loaders or other iterables over batches, but got `list`."
        " Pass loaders one by one: `setup_dataloaders(*loaders)`.",
    ),
    "loader twice": (
        ValueError,
        lambda f: f.setup_dataloaders(f.setup_dataloaders(DataLoader([1]))),
        "This data loader was set up before. Each loader is set up once, as you made it.",
    ),
}


@pytest.mark.parametrize("case", WRONG_SETUPS)
def test_wrong_setups_say_what_to_do(case):
    error, call, text = WRONG_SETUPS[case]
    with raises(error, text):
        call(one())


def test_move_to_device_can_be_left_out():
    model = one().setup(nn.Linear(1, 1), move_to_device=False)
    assert model.weight.device.type == "cpu"


def test_loaders_come_back_alone_or_in_a_list():
    fabric = one()
    loaders = [DataLoader([1, 2]), DataLoader([3])]
    assert [batch.item() for batch in fabric.setup_dataloaders(loaders[0])] == [1, 2]
    assert isinstance(fabric.setup_dataloaders(*loaders), list)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("64-true", torch.float64),
        ("16-true", torch.float16),
        ("bf16-true", torch.bfloat16),
        ("16-mixed", torch.float32),
        ("bf16-mixed", torch.float32),
    ],
)
def test_init_module_and_init_tensor_use_the_precisions_dtype(precision, dtype):
    fabric = one(precision=precision)
    with fabric.init_module():
        assert nn.Linear(2, 2).weight.dtype == dtype
    with fabric.init_tensor():
        assert torch.ones(1).dtype == dtype
        assert torch.ones(1, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(KeyError), fabric.init_module():
        raise KeyError
    assert torch.get_default_dtype() == torch.float32


def test_init_module_without_values_skips_the_initialisation():
    fabric = one()
    state = torch.get_rng_state()
    with fabric.init_module(empty_init=True):
        net = nn.Linear(64, 64)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.weight.shape == (64, 64)
    model = fabric.setup(net)
    assert model.weight.device == fabric.device


# --------------------------------------------------------------------------------------------------------------------
# Step
# --------------------------------------------------------------------------------------------------------------------
def test_backward_passes_arguments_on_and_never_rescales():
    fabric = one()
    model = fabric.setup(nn.Linear(2, 1, bias=False))
    loss = model(torch.ones(1, 2)).sum()
    fabric.backward(loss, retain_graph=True)
    fabric.backward(loss)
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
    fabric.backward(model(torch.ones(1, 2)), torch.full((1, 1), 3.0))
    assert model.weight.grad.tolist() == [[5.0, 5.0]]


def test_backward_with_several_models():
    fabric = one()
    first, second = fabric.setup(nn.Linear(2, 1)), fabric.setup(nn.Linear(2, 1))
    fabric.backward(second(torch.ones(1, 2)).sum(), model=second)
    fabric.backward(first(torch.ones(1, 2)).sum())
    assert first.weight.grad is not None


def test_clip_gradients_needs_one_of_two():
    fabric = one()
    model, optimizer = fabric.setup(*linear_and_sgd())
    text = "`fabric.clip_gradients(...)` needs `clip_val=` (for each element) or `max_norm=` (for the norm)."
    with raises(ValueError, text):
        fabric.clip_gradients(model, optimizer)
    text = "`fabric.clip_gradients(clip_val=1.0, max_norm=2.0)` can't clip by value and by norm. Leave one of them out."
    with raises(ValueError, text):
        fabric.clip_gradients(model, optimizer, clip_val=1.0, max_norm=2.0)


def test_clip_gradients_returns_the_norm_before():
    fabric = one()
    model, optimizer = fabric.setup(*linear_and_sgd())
    fabric.backward(model(torch.full((1, 2), 2.0)).sum())
    assert fabric.clip_gradients(model, optimizer, max_norm=0.5).item() == 3.0
    assert fabric.clip_gradients(model, optimizer, max_norm=0.5).item() == pytest.approx(0.5)
    assert fabric.clip_gradients(model, optimizer, max_norm=9.0, norm_type=float("inf")).item() == pytest.approx(
        1 / 3, rel=1e-5
    )
    assert fabric.clip_gradients(model, optimizer, clip_val=0.1) is None
    assert model.weight.grad.max() == 0.1


def test_a_norm_that_is_not_finite():
    fabric = one()
    model, optimizer = fabric.setup(*linear_and_sgd())
    fabric.backward(model(torch.full((1, 2), float("inf"))).sum())
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).item() == float("inf")


def test_an_overflow_under_the_loss_scaler_does_not_raise_and_skips_the_step():
    fabric = one(precision="16-mixed")
    model, optimizer = fabric.setup(*linear_and_sgd())
    before = model.weight.detach().clone()
    fabric.backward(model(torch.full((1, 2), 1e4)).sum() * 1e4)
    assert not fabric.clip_gradients(model, optimizer, max_norm=1.0).isfinite()
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_autocast_is_the_precisions_context():
    fabric = one(precision="bf16-mixed")
    with fabric.autocast():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.bfloat16
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32
    with one().autocast():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32


def test_no_backward_sync_takes_a_module_that_was_set_up():
    text = "`fabric.no_backward_sync(module)` takes a module that `fabric.setup(...)` returned, but got `Linear`."
    with raises(TypeError, text):
        one().no_backward_sync(nn.Linear(1, 1))


def test_to_device_moves_any_nesting():
    fabric = one()
    net = nn.Linear(1, 1)
    assert fabric.to_device(net) is net
    moved = fabric.to_device({"a": [torch.ones(1)], "b": "text"})
    assert moved["a"][0].item() == 1
    assert moved["b"] == "text"


def gan_step(fabric, generator, discriminator, generator_optimizer, discriminator_optimizer):
    """Two models, two optimizers, gradients of one through the other."""
    for step in range(3):
        torch.manual_seed(step)
        noise, real = torch.randn(4, 2), torch.randn(4, 3)
        fake = generator(noise)
        discriminator_optimizer.zero_grad()
        loss = (discriminator(real) - 1).square().mean() + discriminator(fake.detach()).square().mean()
        fabric.backward(loss, model=discriminator)
        discriminator_optimizer.step()
        generator_optimizer.zero_grad()
        fabric.backward((discriminator(fake) - 1).square().mean(), model=generator)
        generator_optimizer.step()


class PlainFabric:
    """`gan_step` in plain PyTorch."""

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def backward(self, loss, model=None):
        loss.backward()


def gan_models():
    torch.manual_seed(7)
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    return (
        generator,
        discriminator,
        torch.optim.SGD(generator.parameters(), lr=0.1),
        torch.optim.SGD(discriminator.parameters(), lr=0.1),
    )


def test_a_gan_trains_as_in_plain_pytorch():
    expected = gan_models()
    gan_step(PlainFabric(), *expected)
    fabric = one()
    generator, discriminator, generator_optimizer, discriminator_optimizer = gan_models()
    gan_step(
        fabric,
        fabric.setup_module(generator),
        fabric.setup_module(discriminator),
        *fabric.setup_optimizers(generator_optimizer, discriminator_optimizer),
    )
    assert torch.equal(generator.weight, expected[0].weight)
    assert torch.equal(discriminator.weight, expected[1].weight)


def test_one_loss_scaler_serves_two_optimizers():
    """`update()` runs once a round, after the last step: both optimizers take whole steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    fabric = one(plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1.0) for net in (first, second)]
    before = [net.weight.item() for net in (first, second)]
    models = [fabric.setup_module(net) for net in (first, second)]
    optimizers = fabric.setup_optimizers(*optimizers)
    x = torch.ones(1, 1)
    fabric.backward(models[0](x).sum() + models[1](x).sum())
    for optimizer in optimizers:
        optimizer.step()
    assert [net.weight.item() for net in (first, second)] == pytest.approx([b - 1.0 for b in before])
    assert scaler.get_scale() == 4.0
    for optimizer in optimizers:
        optimizer.zero_grad()
    fabric.backward(models[0](x).sum())
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("clip_the_next", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_step_given_up_after_clipping_leaves_the_next_one_whole(overflow, clip_the_next, set_to_none):
    """The classic `if norm > limit: optimizer.zero_grad(); continue`, under a loss scaler."""
    fabric = one(plugins=MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0)))
    net = nn.Linear(1, 1, bias=False)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    before = net.weight.item()
    fabric.backward(model(torch.ones(1, 1)).sum() * (1e8 if overflow else 1))
    fabric.clip_gradients(model, optimizer, max_norm=10.0)
    optimizer.zero_grad(set_to_none=set_to_none)
    fabric.backward(model(torch.ones(1, 1)).sum())
    if clip_the_next:
        assert fabric.clip_gradients(model, optimizer, max_norm=10.0).item() == 1.0
    optimizer.step()
    assert net.weight.item() == pytest.approx(before - 1.0)
    assert fabric.precision.state_dict()["scale"] == (32.0 if overflow else 64.0)


def test_clipping_one_optimizer_before_the_backward_of_another():
    fabric = one(plugins=MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0)))
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    before = [net.weight.item() for net in nets]
    pairs = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0)) for net in nets]
    for model, optimizer in pairs:
        fabric.backward(model(torch.ones(1, 1)).sum())
        assert fabric.clip_gradients(model, optimizer, max_norm=10.0).item() == 1.0
    for _, optimizer in pairs:
        optimizer.step()
    assert [net.weight.item() for net in nets] == pytest.approx([b - 1.0 for b in before])


# --------------------------------------------------------------------------------------------------------------------
# Observe
# --------------------------------------------------------------------------------------------------------------------
class ListLogger(Logger):
    def __init__(self):
        self.seen = []

    @property
    def name(self):
        return "list"

    @property
    def version(self):
        return 0

    def log_metrics(self, metrics, step=None):
        self.seen.append((dict(metrics), step))

    def log_hyperparams(self, *args, **kwargs):
        pass


def test_log_reaches_every_logger():
    loggers = [ListLogger(), ListLogger()]
    fabric = one(loggers=loggers)
    assert fabric.logger is loggers[0]
    fabric.log("loss", torch.tensor(1.5, requires_grad=True), step=3)
    fabric.log_dict({"a": 1, "b": torch.tensor([2])})
    for logger in loggers:
        assert logger.seen == [({"loss": 1.5}, 3), ({"a": 1, "b": 2}, None)]
        assert all(type(v) in (int, float) for metrics, _ in logger.seen for v in metrics.values())


def test_log_takes_one_number():
    with pytest.raises(ValueError, match=r"2 elements|one element|single"):
        one(loggers=ListLogger()).log("loss", torch.ones(2))


class Callback:
    def __init__(self, calls):
        self.calls = calls

    def on_step(self, *args, **kwargs):
        self.calls.append((self, args, kwargs))

    on_broken = "no method"


def test_call_reaches_each_callback_that_has_the_hook_in_order():
    calls = []
    first, second = Callback(calls), Callback(calls)
    fabric = one(callbacks=[first, object(), second])
    fabric.call("on_step", 1, key=2)
    fabric.call("on_nothing")
    assert calls == [(first, (1,), {"key": 2}), (second, (1,), {"key": 2})]
    one(callbacks=first).call("on_step")
    assert len(calls) == 3


def test_a_hook_that_cannot_be_called():
    text = "`fabric.call('on_broken')`: `Callback.on_broken` is a `str`, not a method."
    with raises(TypeError, text + " Make it one, or call another hook."):
        one(callbacks=Callback([])).call("on_broken")


def test_print_prints_on_rank_0(capsys):
    one().print("hello", 1, sep="-")
    assert capsys.readouterr().out == "hello-1\n"


def test_save_takes_a_dictionary(tmp_path):
    text = (
        "`fabric.save(path, state)` takes a dictionary of names and objects, but got `Linear`."
        " Write `fabric.save(path, {'model': model, 'step': step})`."
    )
    with raises(TypeError, text):
        one().save(tmp_path / "file", nn.Linear(1, 1))


# --------------------------------------------------------------------------------------------------------------------
# Steppable: what a person with a debugger walks through
# --------------------------------------------------------------------------------------------------------------------
PACKAGE = str(Path(package.__file__).parent) + os.sep


class CountingTensor(torch.Tensor):
    def backward(self, *args, **kwargs):
        counts["backward"] = frames_of_fabric()
        return super().backward(*args, **kwargs)


class CountingSGD(torch.optim.SGD):
    def step(self, closure=None):
        counts["step"] = frames_of_fabric()
        return super().step(closure)


class CountingNet(nn.Linear):
    def forward(self, x):
        counts["forward"] = frames_of_fabric()
        return super().forward(x)


counts = {}


def frames_of_fabric():
    frame, count = sys._getframe(1), 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return count


def count_frames(fabric):
    counts.clear()
    net = CountingNet(2, 1)
    model, optimizer = fabric.setup(net, CountingSGD(net.parameters(), lr=0.1))
    loss = model(torch.ones(1, 2)).sum()
    fabric.backward(loss.as_subclass(CountingTensor))
    optimizer.step()
    return dict(counts)


def count_frames_on_ranks(context, precision):
    return count_frames(context.fabric(precision=precision))


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_at_most_three_of_our_frames_stand_before_pytorchs(precision):
    found = count_frames(one(precision=precision))
    assert set(found) == {"forward", "backward", "step"}
    assert all(1 <= count <= 3 for count in found.values()), found


@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_at_most_three_of_our_frames_under_ddp(precision):
    for found in run_ranks(2, count_frames_on_ranks, precision):
        assert all(1 <= count <= 3 for count in found.values()), found


# --------------------------------------------------------------------------------------------------------------------
# On real ranks
# --------------------------------------------------------------------------------------------------------------------
def who_am_i(context):
    fabric = context.fabric()
    assert fabric.global_rank == fabric.local_rank == context.rank
    assert fabric.is_global_zero == (context.rank == 0)
    assert isinstance(fabric.strategy, DDPStrategy)
    return fabric.world_size, fabric.node_rank, str(fabric.device), torch.distributed.get_world_size()


def collectives(context):
    fabric = context.fabric()
    rank = context.rank
    x = torch.tensor([float(rank), 1.0])
    gathered = fabric.all_gather({"x": x, "n": rank, "text": "same"})
    assert gathered["x"].tolist() == [[0.0, 1.0], [1.0, 1.0]]
    assert gathered["n"].tolist() == [0, 1]
    assert gathered["text"] == "same"
    assert fabric.all_reduce(x).tolist() == [0.5, 1.0]
    assert x.tolist() == [float(rank), 1.0]
    assert fabric.all_reduce(torch.tensor(rank)).item() == 0.5  # the mean of integers is no integer
    assert fabric.all_reduce([rank + 1, x], reduce_op="sum")[0].item() == 3
    assert fabric.all_reduce(torch.tensor(rank), reduce_op="max").item() == 1
    assert fabric.broadcast({"rank": rank}) == {"rank": 0}
    assert fabric.broadcast(torch.tensor(rank), src=1).item() == 1
    fabric.barrier("name")
    leaf = torch.tensor([float(rank)], requires_grad=True)
    (fabric.all_gather(leaf, sync_grads=True).squeeze(1) * torch.tensor([1.0, 10.0])).sum().backward()
    return leaf.grad.item()


def ragged_gather(context):
    fabric = context.fabric()
    try:
        fabric.all_gather(torch.ones(context.rank + 1))
    except ValueError as error:
        return str(error)


def unknown_reduction(context):
    fabric = context.fabric()
    with pytest.raises(ValueError, match=r"^`reduce_op='median'` is not a reduction\. Choose one of "):
        fabric.all_reduce(torch.ones(1), reduce_op="median")


def rank_zero_first(context, local):
    fabric = context.fabric()
    with fabric.rank_zero_first(local=local):
        seen = sorted(p.name for p in context.directory.glob("rank*"))
        (context.directory / f"rank{context.rank}").touch()
    return seen


def rank_zero_first_fails(context):
    fabric = context.fabric()
    try:
        with fabric.rank_zero_first():
            if context.rank == 0:
                raise KeyError("disk full")
    except (KeyError, RuntimeError) as error:
        fabric.barrier()  # nobody hangs, and the ranks still work together
        return f"{type(error).__name__}: {error}"


def seeds(context):
    """The seed of the data is rank 0's, whatever the ranks' own seeds are."""
    torch.manual_seed(context.rank)
    fabric = context.fabric()
    loader = fabric.setup_dataloaders(DataLoader(list(range(8)), shuffle=True))
    return [batch.item() for batch in loader]


def second_fabric(context):
    first = context.fabric()
    second = context.fabric(precision="bf16-mixed")
    assert second.world_size == 2
    assert second.broadcast(context.rank) == 0
    model = second.setup(nn.Linear(1, 1))
    second.teardown()
    first.barrier()  # the group is the first one's and still there
    return model.weight.dtype


def group_of_another_size(context):
    context.process_group()
    strategy = DDPStrategy()
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    try:
        fabric.launch()
    except RuntimeError as error:
        return str(error)


def teardown_ends_the_group(context):
    fabric = context.fabric()
    fabric.teardown()
    assert not torch.distributed.is_initialized()
    again = context.fabric()
    assert again.all_reduce(torch.tensor(1.0), reduce_op="sum").item() == 2
    again.teardown()
    assert not torch.distributed.is_initialized()


def synced_weight(context, way):
    """Two backward passes on data that differ by rank; returns the gradient."""
    fabric = context.fabric()
    torch.manual_seed(0)
    net = nn.Linear(1, 1, bias=False)
    model = fabric.setup(net)

    def backward():
        fabric.backward(model(torch.full((1, 1), float(context.rank + 1))).sum())

    if way == "off, then on":
        with fabric.no_backward_sync(model):
            backward()
        backward()
    elif way == "not enabled":
        with fabric.no_backward_sync(model, enabled=False):
            backward()
        backward()
    elif way == "nested":
        with fabric.no_backward_sync(model):
            with fabric.no_backward_sync(model):
                backward()
            with fabric.no_backward_sync(model, enabled=False):
                backward()
        assert net.weight.grad.item() == 2 * (context.rank + 1)  # still off inside
        net.weight.grad = None
        backward()
        backward()
    elif way == "after an error":
        with pytest.raises(KeyError), fabric.no_backward_sync(model):
            raise KeyError
        backward()
        backward()
    return net.weight.grad.item()


def gan_on_ranks(context):
    fabric = context.fabric()
    generator, discriminator, *optimizers = gan_models()
    gan_step(
        fabric,
        fabric.setup_module(generator),
        fabric.setup_module(discriminator),
        *fabric.setup_optimizers(*optimizers),
    )
    return generator.weight.detach(), discriminator.weight.detach()


def overflow_on_one_rank(context):
    fabric = context.fabric(precision="16-mixed")
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = net.weight.detach().clone()
    factor = 1e4 if context.rank == 1 else 1.0
    fabric.backward(model(torch.full((1, 2), factor)).sum() * factor)
    optimizer.step()
    return torch.equal(net.weight, before), fabric.precision.state_dict()["scale"]


def frozen_model(context):
    fabric = context.fabric()
    torch.manual_seed(context.rank)
    net = nn.Linear(2, 2).requires_grad_(False)
    model = fabric.setup(net)
    with fabric.no_backward_sync(model):
        out = model(torch.ones(1, 2))
    return out


def prints(context):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        context.fabric().print("once")
    return out.getvalue()


@pytest.mark.ranks
class TestOnRanks:
    def test_who_am_i(self):
        assert run_ranks(2, who_am_i) == [(2, 0, "cpu", 2)] * 2

    def test_collectives(self):
        assert run_ranks(2, collectives) == [2.0, 20.0]  # the gradients of both ranks, summed

    def test_gathering_unlike_shapes_names_them(self):
        text = (
            "`fabric.all_gather(...)` needs tensors of one shape and dtype on all ranks, but got"
            " rank 0: float32 [1]; rank 1: float32 [2]. Pad them to the same shape first, or pass `pad_value=`."
        )
        assert run_ranks(2, ragged_gather) == [text] * 2

    def test_unknown_reduction(self):
        run_ranks(2, unknown_reduction)

    @pytest.mark.parametrize("local", [False, True])
    def test_rank_zero_first(self, local):
        assert run_ranks(2, rank_zero_first, local) == [[], ["rank0"]]

    def test_a_failure_in_rank_zero_first_is_raised_everywhere(self):
        assert run_ranks(2, rank_zero_first_fails) == [
            "KeyError: 'disk full'",
            "RuntimeError: Rank 0 failed inside `fabric.rank_zero_first()`: KeyError: 'disk full'",
        ]

    def test_an_unset_seed_is_rank_zeros(self):
        first, second = run_ranks(2, seeds)
        assert sorted(first + second) == list(range(8))

    def test_a_second_fabric_joins_the_same_world(self):
        assert run_ranks(2, second_fabric) == [torch.float32] * 2

    def test_another_world_in_the_same_process_raises(self):
        text = (
            "`Fabric` asks for 1 processes, but this process already belongs to a job of 2. A process launches once:"
            " give both `Fabric` objects the same `devices=` and `num_nodes=`, or call `teardown()` on the first one."
        )
        assert run_ranks(2, group_of_another_size) == [text] * 2

    def test_teardown_ends_the_group_and_a_new_one_can_start(self):
        run_ranks(2, teardown_ends_the_group)

    @pytest.mark.parametrize("way", ["off, then on", "not enabled", "nested", "after an error"])
    def test_no_backward_sync_leaves_synchronisation_on(self, way):
        assert run_ranks(2, synced_weight, way) == [3.0, 3.0]

    def test_a_gan_equals_one_process(self):
        expected = gan_models()
        gan_step(PlainFabric(), *expected)
        for generator, discriminator in run_ranks(2, gan_on_ranks):
            torch.testing.assert_close(generator, expected[0].weight.detach())
            torch.testing.assert_close(discriminator, expected[1].weight.detach())

    def test_an_overflow_that_one_rank_sees_is_skipped_by_all(self):
        assert run_ranks(2, overflow_on_one_rank) == [(True, 32768.0)] * 2

    def test_a_model_with_nothing_to_train(self):
        first, second = run_ranks(2, frozen_model)
        assert torch.equal(first, second)

    def test_print_prints_once(self):
        assert run_ranks(2, prints) == ["once\n", ""]


# --------------------------------------------------------------------------------------------------------------------
# Real scripts
# --------------------------------------------------------------------------------------------------------------------
def run_script(tmp_path, text, *, timeout=200):
    (tmp_path / "main.py").write_text(text)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}  # a line of a rank is one write
    command = [sys.executable, "main.py"]
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=timeout)


@pytest.mark.ranks
def test_a_script_launches_once_and_a_second_fabric_joins(tmp_path):
    """Also: nothing is written to `os.environ`, before, during and after the job."""
    done = run_script(
        tmp_path,
        """
import os
before = dict(os.environ)
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2)
assert dict(os.environ) == before
fabric.launch()
fabric.launch()
assert dict(os.environ) == before
second = Fabric(accelerator="cpu", devices=2)
second.launch()
third = Fabric(accelerator="cpu", devices="auto", strategy="ddp")
print("rank", fabric.global_rank, fabric.world_size, second.global_rank, second.broadcast("same"), flush=True)
try:
    Fabric(accelerator="cpu", devices=4).launch()
except (RuntimeError, ValueError) as error:
    print("refused", flush=True)
fabric.barrier()
assert dict(os.environ) == before
""",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 2 0 same", "rank 1 2 1 same", "refused", "refused"]


@pytest.mark.ranks
def test_a_subclass_with_its_own_run_launches_from_a_script(tmp_path):
    done = run_script(
        tmp_path,
        """
from fabric import Fabric

class Trainer(Fabric):
    def run(self, value):
        return self.all_reduce(self.global_rank + value, reduce_op="sum").item()

if __name__ == "__main__":
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn")
    print(trainer.run(10), flush=True)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "21\n"


def test_importing_fabric_loads_nothing_heavy():
    heavy = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo")
    code = "import sys, torch; before = set(sys.modules); from fabric import Fabric; print(*set(sys.modules) - before)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in found if name.startswith((*heavy, "fsspec", "torch.distributed.pipelining"))]
    code = "import sys, fabric, fabric.cli; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in found


def test_the_constructor_and_setup_leave_cuda_alone():
    code = "import torch; from fabric import Fabric; f = Fabric(); print(torch.cuda.is_initialized())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


# --------------------------------------------------------------------------------------------------------------------
# Set up once; optimizers with a past; plugins of another device
# --------------------------------------------------------------------------------------------------------------------
def test_the_same_objects_are_set_up_once():
    fabric = one()
    net, optimizer = linear_and_sgd()
    wrapped = fabric.setup(net, optimizer)
    with raises(
        ValueError, "This module was set up before. `fabric.setup(model, ...)` takes each module once, as you made it."
    ):
        fabric.setup(net)
    with raises(ValueError, "This optimizer was set up before. Each optimizer is set up once, as you made it."):
        fabric.setup_optimizers(optimizer)
    del wrapped  # nobody uses that any more
    fabric.setup(net, optimizer)


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_the_state_of_an_optimizer_follows_its_parameters(precision, dtype):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    group = optimizer.param_groups[0]
    fabric = one(precision=precision)
    model, wrapped = fabric.setup(net, optimizer)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {dtype}
    assert wrapped.param_groups[0] is group
    fabric.backward(model(torch.ones(1, 2)).sum())
    wrapped.step()


def test_a_precision_made_for_another_device():
    text = (
        "`Fabric(plugins=MixedPrecision(...))` was made for `cuda`, but the devices are `cpu`."
        " Make it with `device='cpu'`."
    )
    with raises(ValueError, text):
        one(plugins=MixedPrecision("bf16-mixed", "cuda"))


def test_loggers_are_loggers():
    text = (
        "`Fabric(loggers=...)` takes `Logger` objects, but got `str`. Write `Fabric(loggers=CSVLogger('logs'))`, or"
        " subclass `fabric.loggers.Logger`."
    )
    with raises(TypeError, text):
        one(loggers="csv")


def test_clip_gradients_takes_a_module_and_its_optimizer():
    fabric = one()
    model, optimizer = fabric.setup(*linear_and_sgd())
    text = (
        "`fabric.clip_gradients(module, optimizer, ...)` takes a module and its optimizer, but got `Linear` and `list`."
    )
    with raises(TypeError, text.replace("Linear", "_FabricModule")):
        fabric.clip_gradients(model, [optimizer], max_norm=1.0)


def test_what_was_set_up_is_not_kept_alive():
    fabric = one()
    net, optimizer = linear_and_sgd()
    model, stepper = fabric.setup(net, optimizer)
    alive = weakref.ref(net)
    del net, optimizer, model, stepper
    gc.collect()
    assert alive() is None
