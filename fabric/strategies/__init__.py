# SPDX-License-Identifier: Apache-2.0
"""Strategies: how a loop runs on the devices."""

from functools import partial
from typing import TYPE_CHECKING

from fabric.strategies.ddp import DDPStrategy
from fabric.strategies.dp import DataParallelStrategy
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.registry import StrategyRegistry, _OnUse
from fabric.strategies.single_device import SingleDeviceStrategy
from fabric.strategies.strategy import Strategy
from fabric.utilities.lazy import importing_on_use

if TYPE_CHECKING:
    from fabric.strategies.fsdp import FSDPStrategy
    from fabric.strategies.model_parallel import ModelParallelStrategy
    from fabric.strategies.pipeline_parallel import PipelineParallelStrategy
    from fabric.strategies.sharded import ShardedStrategy

__all__ = [
    "STRATEGIES",
    "STRATEGY_REGISTRY",
    "DDPStrategy",
    "DataParallelStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "PipelineParallelStrategy",
    "ShardedStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "StrategyRegistry",
]

# Resolved on first use: what shards a model is a fifth of all modules.
_EXPORTS = {
    "FSDPStrategy": "fabric.strategies.fsdp",
    "ModelParallelStrategy": "fabric.strategies.model_parallel",
    "PipelineParallelStrategy": "fabric.strategies.pipeline_parallel",
    "ShardedStrategy": "fabric.strategies.sharded",
}

__getattr__ = importing_on_use(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


STRATEGIES = StrategyRegistry(
    single_device=SingleDeviceStrategy,
    dp=DataParallelStrategy,
    ddp=DDPStrategy,
    ddp_spawn=partial(DDPStrategy, start_method="spawn"),
    ddp_fork=partial(DDPStrategy, start_method="fork"),
    ddp_notebook=partial(DDPStrategy, start_method="fork"),
    ddp_find_unused_parameters_true=partial(DDPStrategy, find_unused_parameters=True),
    fsdp=_OnUse("FSDPStrategy", __getattr__),
    fsdp_cpu_offload=_OnUse("FSDPStrategy", __getattr__, cpu_offload=True),
    hsdp=_OnUse("FSDPStrategy", __getattr__, sharding_strategy="HYBRID_SHARD"),
)
STRATEGY_REGISTRY = STRATEGIES
