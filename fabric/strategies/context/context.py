# SPDX-License-Identifier: Apache-2.0
"""What all ways to divide a sequence over ranks share."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fabric.strategies.context.sequences import CALL, Sequenced, find_sequences, replace


class ContextParallel(ABC):
    """The ranks that share a batch, each with a part of its sequence.

    Args:
        group: These ranks, in the order of the sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_entered = False

    @contextmanager
    def divide(self, tensors: Any, seq_dims: Any) -> Iterator[Any]:
        """What `fabric.context_parallel` does: yields this rank's parts; attention goes over those of all ranks inside.

        Args:
            tensors: A tensor or any nesting of containers; nothing in it is changed.
            seq_dims: The dimension of the sequence: one for all tensors, or the same nesting of them; None leaves a
                tensor whole.

        Raises:
            RuntimeError: Inside of another such context.
            TypeError, ValueError: If tensors and dimensions do not belong together, or the length can't be divided.
        """
        if self._is_entered:
            raise RuntimeError(
                f"{CALL} was called inside of such a block. The sequence is divided there already:"
                " leave that block first, or give all tensors to the outer one."
            )
        found = find_sequences(tensors, seq_dims, self._group.size())
        sequences = [each for each in found if each.dim is not None]
        self._is_entered = True
        try:
            with self._attend(sequences) as parts:
                own = iter(parts)
                yield replace(tensors, lambda each: each.tensor if each.dim is None else next(own), found)
        finally:
            self._is_entered = False

    @abstractmethod
    def _attend(self, sequences: Sequence[Sequenced]) -> AbstractContextManager[list[Tensor]]:
        """Yields this rank's part of each, a new tensor; attention goes over all parts inside."""

    @abstractmethod
    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole of what each rank has a part of, in the order of the sequence; without gradients.

        Args:
            tensor: Of one shape on all ranks.
            dim: The dimension of the sequence.
        """
