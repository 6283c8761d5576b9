# SPDX-License-Identifier: Apache-2.0
"""Types that several modules share. The protocols can be asked with `isinstance`."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

PathLike: TypeAlias = str | os.PathLike[str]
DeviceLike: TypeAlias = str | torch.device
ReduceOp: TypeAlias = "str | torch.distributed.ReduceOp.RedOpType"

__all__ = [
    "DeviceLike",
    "LRScheduler",
    "Optimizable",
    "PathLike",
    "ReduceLROnPlateau",
    "ReduceOp",
    "Stateful",
    "Steppable",
]


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken out and put back."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""


@runtime_checkable
class Steppable(Protocol):
    """Anything with an optimizer's `step(closure)`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """Anything that offers what training needs of an optimizer."""

    param_groups: list[dict[str, Any]]
    defaults: Mapping[str, Any]
    state: Mapping[Any, Any]

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state back."""
