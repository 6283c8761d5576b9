# SPDX-License-Identifier: Apache-2.0
"""Strategies: how a loop runs on the devices."""

from functools import partial

from fabric.strategies.ddp import DDPStrategy
from fabric.strategies.dp import DataParallelStrategy
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.registry import StrategyRegistry
from fabric.strategies.single_device import SingleDeviceStrategy
from fabric.strategies.strategy import Strategy

__all__ = [
    "STRATEGIES",
    "STRATEGY_REGISTRY",
    "DDPStrategy",
    "DataParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "StrategyRegistry",
]

STRATEGIES = StrategyRegistry(
    single_device=SingleDeviceStrategy,
    dp=DataParallelStrategy,
    ddp=DDPStrategy,
    ddp_spawn=partial(DDPStrategy, start_method="spawn"),
    ddp_fork=partial(DDPStrategy, start_method="fork"),
    ddp_notebook=partial(DDPStrategy, start_method="fork"),
    ddp_find_unused_parameters_true=partial(DDPStrategy, find_unused_parameters=True),
)
STRATEGY_REGISTRY = STRATEGIES
