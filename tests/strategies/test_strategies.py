# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest
import torch

import fabric.strategies
from fabric.accelerators import CPUAccelerator
from fabric.plugins.environments import LocalEnvironment
from fabric.plugins.io import TorchCheckpointIO
from fabric.plugins.precision import MixedPrecision, Precision
from fabric.strategies import (
    STRATEGIES,
    STRATEGY_REGISTRY,
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    Strategy,
)


def _bound(strategy, precision=None):
    strategy.bind(
        accelerator=CPUAccelerator(),
        devices=[torch.device("cpu")],
        environment=LocalEnvironment(1),
        precision=precision or Precision(),
    )
    return strategy


def test_each_name_makes_its_strategy():
    made = {name: make() for name, make in STRATEGIES.items()}
    assert {name: type(strategy) for name, strategy in made.items()} == {
        "single_device": SingleDeviceStrategy,
        "dp": DataParallelStrategy,
        "ddp": DDPStrategy,
        "ddp_spawn": DDPStrategy,
        "ddp_fork": DDPStrategy,
        "ddp_notebook": DDPStrategy,
        "ddp_find_unused_parameters_true": DDPStrategy,
        "fsdp": FSDPStrategy,
        "fsdp_cpu_offload": FSDPStrategy,
        "hsdp": FSDPStrategy,
    }
    assert made["ddp_find_unused_parameters_true"].ddp_kwargs["find_unused_parameters"]
    methods = {name: strategy.start_method for name, strategy in made.items() if type(strategy) is DDPStrategy}
    assert methods == {
        "ddp": "subprocess",
        "ddp_spawn": "spawn",
        "ddp_fork": "fork",
        "ddp_notebook": "fork",
        "ddp_find_unused_parameters_true": "subprocess",
    }
    assert STRATEGY_REGISTRY.available_strategies() == sorted(STRATEGIES)


def test_all_is_what_is_exported():
    assert set(fabric.strategies.__all__) <= set(dir(fabric.strategies))


def test_one_device_returns_what_it_is_given():
    strategy = _bound(SingleDeviceStrategy())
    x = torch.ones(2)
    assert strategy.all_gather(x) is x
    assert strategy.all_gather(x, pad_value=0) is x
    assert strategy.gather_alike(x) is x
    reduced = strategy.all_reduce(torch.tensor([3]))
    assert torch.equal(reduced, torch.tensor([3.0]))  # a mean of integers is a float, as on several ranks
    assert strategy.all_reduce(x) is not x
    with pytest.raises(ValueError, match=r"`reduce_op='men'` is not a reduction. Choose one of avg, max, mean, min,"):
        strategy.all_reduce(x, reduce_op="men")
    assert strategy.broadcast("x") == "x"
    assert strategy.gather_objects("x") == ["x"]
    assert strategy.reduce_boolean_decision(False) is False
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}


def test_dp_calls_any_method_through_the_replicas():
    class Doubled(torch.nn.Linear):
        def training_step(self, x):
            return self(x) * 2

    strategy = _bound(DataParallelStrategy())
    module = Doubled(2, 1)
    replicated = strategy.setup_module(module)  # without GPUs PyTorch's `DataParallel` has one replica: the module
    x = torch.ones(3, 2)
    assert isinstance(replicated, torch.nn.DataParallel)
    assert torch.equal(replicated("forward", x), module(x))
    assert torch.equal(replicated("training_step", x), module(x) * 2)


def test_an_unbound_strategy_says_so():
    with pytest.raises(RuntimeError, match="This `SingleDeviceStrategy` does not know its devices yet"):
        _ = SingleDeviceStrategy().root_device


def test_dp_refuses_the_autocast_dtype_that_its_threads_do_not_take():
    text = (
        "`strategy='dp'` can't run `precision='bf16-mixed'`: the threads of `torch.nn.DataParallel` take autocast's"
        " default dtype, float16. Choose 'bf16-true' or '16-mixed', or `strategy='ddp'`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        _bound(DataParallelStrategy(), MixedPrecision("bf16-mixed", "cpu"))
    _bound(DataParallelStrategy(), MixedPrecision("16-mixed", "cpu"))


def test_a_strategys_own_checkpoint_io_is_kept():
    class Kept(TorchCheckpointIO):
        pass

    class Own(SingleDeviceStrategy):
        def __init__(self):
            super().__init__()
            self._checkpoint_io = Kept()

    assert type(_bound(Own()).checkpoint_io) is Kept


def test_the_docs_name_each_hook():
    page = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    hooks = {name for name in vars(Strategy) | vars(Strategy.__base__) if not name.startswith("_")}
    assert len(hooks) > 50
    assert {name for name in hooks if f"`{name}" not in page} == set()
