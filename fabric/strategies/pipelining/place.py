# SPDX-License-Identifier: Apache-2.0
"""Where a rank stands in its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """The ranks of one pipeline, and this one among them.

    Args:
        group: Their process group.
        rank: This rank in the pipeline.
        global_ranks: The global rank of each.
        device: Where this rank computes.
    """

    group: ProcessGroup
    rank: int
    global_ranks: Sequence[int]
    device: torch.device

    @property
    def size(self) -> int:
        """Number of ranks in the pipeline."""
        return len(self.global_ranks)

    def object_of(self, rank: int, obj: T) -> T:
        """The object of one rank of the pipeline, on all of them."""
        box = [obj]
        dist.broadcast_object_list(box, src=self.global_ranks[rank], group=self.group)
        return box[0]

    def objects(self, obj: T) -> list[T]:
        """The objects of all ranks of the pipeline, in order."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self.group)
        return gathered

    def tensor_of(self, rank: int, tensor: Tensor | None, like: Tensor) -> Tensor:
        """The tensor of one rank of the pipeline, on all of them.

        Args:
            rank: Who has it.
            tensor: The tensor; None on the others.
            like: Of its shape and dtype.
        """
        if tensor is None:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        tensor = tensor.detach().contiguous()
        dist.broadcast(tensor, src=self.global_ranks[rank], group=self.group)
        return tensor

    def send(self, tensor: Tensor, rank: int) -> Any:
        """Begin to send to another rank of the pipeline."""
        return dist.isend(tensor, self.global_ranks[rank], group=self.group)

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Wait for a tensor of this shape and dtype from another rank of the pipeline."""
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        dist.recv(tensor, self.global_ranks[rank], group=self.group)
        return tensor
