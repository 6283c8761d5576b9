# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors that become whole one at a time, as rank 0 writes them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fabric.checkpoint.access import Attempts, Ranks
from fabric.checkpoint.copies import LaterShard
from fabric.checkpoint.state.later import Later, as_bytes, later, replaced
from fabric.checkpoint.state.shards import is_sharded, whole

Part = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in the whole tensor, and its shape


class Pieces:
    """Sharded tensors that become whole one after the other, on all ranks at once.

    Rank 0 asks for them as it writes. The others, and rank 0 after an error, go through what is left with `drain`.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, Any] = {}
        self._queue: list[Later] = []
        self._parts: dict[int, list[list[Part]]] = {}
        self._ranks: Ranks | None = None

    def later(self, tensor: Tensor | Later) -> Later:
        """What stands for a tensor, or for a copy of its shards; plain ones need nobody else."""
        if isinstance(tensor, Tensor) and not is_sharded(tensor):
            return later(tensor)
        made = Later(tensor.shape, tensor.dtype, lambda: self._bring(made))
        self._tensors[id(made)] = tensor
        return made

    def expect(self, value: Any) -> None:
        """Say in which order they will be asked for: those in `value`, after those that were announced before."""

        def announce(tensor: Any) -> Any:
            if id(tensor) in self._tensors:
                self._queue.append(tensor)
            return tensor

        replaced(value, announce)

    def meet(self, ranks: Ranks) -> None:
        """Say how copies of shards become whole: over the group of the threads. Collective, before the first one."""
        self._ranks = ranks
        copies = [made for made in self._queue if isinstance(self._tensors[id(made)], LaterShard)]
        own = [_parts_of(self._tensors[id(made)]) for made in copies]
        of_ranks = ranks.gather_objects(own) if copies else []
        self._parts = {id(made): [parts[number] for parts in of_ranks] for number, made in enumerate(copies)}

    def drain(self, attempts: Attempts) -> None:
        """Take part for all that are left."""
        while self._queue:
            with attempts:
                self._bring(self._queue[0])

    def _bring(self, made: Later) -> Tensor:
        assert self._queue[0] is made
        tensor = self._tensors[id(self._queue.pop(0))]
        if not isinstance(tensor, LaterShard):
            return whole(tensor)
        assert self._ranks is not None
        return _put_together(tensor, self._parts[id(made)], self._ranks)


def _parts_of(shard: LaterShard) -> list[Part]:
    """The protocol by which PyTorch's distributed checkpoint asks a DTensor where in the whole its part lies."""
    chunks = shard.stand_in().__create_chunk_list__()  # type: ignore[attr-defined]
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if math.prod(chunk.sizes)]


@torch.no_grad()
def _put_together(shard: LaterShard, parts: Sequence[Sequence[Part]], ranks: Ranks) -> Tensor:
    """All of a tensor on rank 0, which gets each part from the first rank that has it; nothing on the others."""
    full = torch.empty(shard.shape if ranks.is_global_zero else (0,), dtype=shard.dtype)
    done = set()
    for owner, own in enumerate(parts):
        for offsets, sizes in own:
            if offsets in done:
                continue
            done.add(offsets)
            part = _sent(shard.read() if owner == ranks.global_rank else None, owner, sizes, shard.dtype, ranks)
            if part is not None:
                place = full
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    place = place.narrow(dim, offset, size)
                place.copy_(part)
    return full


def _sent(own: Tensor | None, owner: int, sizes: Sequence[int], dtype: torch.dtype, ranks: Ranks) -> Tensor | None:
    """A part on rank 0. Only its owner and rank 0 take part."""
    if owner == 0 or ranks.global_rank not in (0, owner):
        return own
    part = torch.empty(sizes, dtype=dtype) if own is None else own.contiguous()
    numbers = as_bytes(part)  # no backend can send each dtype
    if own is None:
        torch.distributed.recv(numbers, owner, group=ranks.checkpoint_group)
        return part
    torch.distributed.send(numbers, 0, group=ranks.checkpoint_group)
    return None
