# SPDX-License-Identifier: Apache-2.0
"""One process on one device."""

from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from fabric.strategies.reduction import ReduceOp, copied, finished, validated
from fabric.strategies.strategy import Strategy

T = TypeVar("T")


class SingleDeviceStrategy(Strategy):
    """One process on one device: a collective over one rank."""

    max_devices: int | None = 1

    @property
    @override
    def root_device(self) -> torch.device:
        return self.devices[0]

    @override
    def barrier(self, name: str | None = None) -> None:
        pass

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj

    @override
    def gather_objects(self, obj: T) -> list[T]:
        return [obj]

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False, pad_value: float | None = None
    ) -> Tensor:
        return tensor

    @override
    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: ReduceOp = "mean") -> Tensor:
        operation = validated(reduce_op)
        return finished(copied(tensor, operation), operation, world_size=1)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision
