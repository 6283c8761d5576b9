# SPDX-License-Identifier: Apache-2.0
"""Talking to the other ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fabric.facade.identity import Identity
from fabric.strategies.reduction import ReduceOp
from fabric.strategies.turns import first_ranks_first
from fabric.utilities.apply_func import apply_to_tensors

T = TypeVar("T")


class Talk(Identity):
    """The collectives: call each of them on every rank."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here."""
        self._require_launch("barrier")
        self._strategy.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank `src`, on every rank."""
        self._require_launch("broadcast")
        return self._strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Tensors (or numbers, in any nesting of containers) of all ranks, stacked along a new first dimension.

        Args:
            data: What to gather; tensors must have the same shape and dtype on all ranks.
            group: A process group; by default all ranks.
            sync_grads: Let gradients flow back to the rank that each part came from.

        Returns:
            The same nesting, with tensors of shape `(world_size, *shape)`; with one rank, of shape `shape`.
        """
        self._require_launch("all_gather")
        return self._on_tensors(data, partial(self._strategy.all_gather, group=group, sync_grads=sync_grads))

    def all_reduce(self, data: Any, group: Any = None, reduce_op: ReduceOp = "mean") -> Any:
        """Tensors (or numbers, in any nesting of containers), reduced over all ranks into new tensors.

        Args:
            data: What to reduce; it is not changed.
            group: A process group; by default all ranks.
            reduce_op: `mean` (of integers too: a float), `sum`, `min`, `max` or `product`.
        """
        self._require_launch("all_reduce")
        return self._on_tensors(data, partial(self._strategy.all_reduce, group=group, reduce_op=reduce_op))

    def _on_tensors(self, data: Any, function: Callable[[Tensor], Tensor]) -> Any:
        def apply(value: Tensor | float) -> Tensor:
            return function(torch.as_tensor(value, device=self.device))

        return apply_to_tensors(data, apply, number=apply)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Rank 0 runs the block first, the others afterwards; if it fails there, every rank raises.

        Args:
            local: Let the first rank of each machine go first, for files on a machine's own disk.
        """
        self._require_launch("rank_zero_first")
        return first_ranks_first(self._strategy, self.is_local_zero if local else self.is_global_zero)
