# SPDX-License-Identifier: Apache-2.0
"""One sampler's order dealt over the ranks."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabric.utilities.seed import IsolatedRandom, derive_seed

# These draw from their `generator` alone, so that a copy with a generator of our own is isolated at no cost.
_DRAW_FROM_THEIR_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_BLOCK = 4096  # items drawn at a time from any other sampler: swapping all generators costs 0.4 ms


class OrderEnd:
    """How many items an order has, over all ranks.

    Attributes:
        length: None until it is known: an order may be drawn while it is dealt, and may have no end.
    """

    __slots__ = ("length",)

    def __init__(self) -> None:
        self.length: int | None = None


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Deals what any sampler (or batch sampler) yields over the ranks in turn: rank `r` of `n` takes `order[r::n]`.

    The order is the wrapped sampler's own, drawn under isolated random number generators, so that it is a function of
    (seed, epoch) alone and the same on every rank and for every number of ranks. It is padded by wrapping around, or
    with `drop_last` cut, so that all ranks get the same number of items. Random numbers that a custom sampler draws
    from Python's, NumPy's and PyTorch's global generators and from `torch.Generator` attributes are isolated; one that
    owns any other generator has to seed it equally on all ranks. A custom sampler is drawn from in blocks, in advance.

    Args:
        sampler: Any iterable over indices or batches of indices; it may be endless. It is not changed, but a
            `set_epoch` that it has is called.
        num_replicas: Number of ranks; by default that of the process group.
        rank: This rank; by default that in the process group.
        seed: Where the random numbers start; equal on all ranks.
        drop_last: Whether to leave out the last items that do not go round.

    Example:
        >>> [list(DistributedSamplerWrapper(range(5), num_replicas=2, rank=rank)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        # Not the constructor of `DistributedSampler`: it asks for the length, which an endless sampler has not.
        self.sampler = sampler
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"`rank={self.rank}` is out of bounds: it goes from 0 to {self.num_replicas - 1}.")
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.consumed = 0
        self.end = OrderEnd()

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not there yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        total = len(self.sampler)  # type: ignore[arg-type]
        return total // self.num_replicas if self.drop_last else -(-total // self.num_replicas)

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Number of items of this rank."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Number of items of all ranks."""
        return len(self) * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def skip(self, consumed: int) -> None:
        """Leave out the first `consumed` items of the global order, in iterations that start from now on."""
        self.consumed = consumed

    def watch(self) -> OrderEnd:
        """What will tell the length of the order of the next iteration, before an item is dealt that pads it."""
        self.end = OrderEnd()
        return self.end

    def __iter__(self) -> Iterator[Any]:
        # The epoch of now: when the first item is asked for, it may have advanced.
        return self._iterate(self.epoch, self.consumed, self.end)

    def _iterate(self, epoch: int, consumed: int, end: OrderEnd) -> Iterator[Any]:
        sampler, seed = self.sampler, derive_seed(self.seed, epoch)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        if type(sampler) is SequentialSampler:
            yield from self._share(range(len(sampler)), consumed, end)
        elif type(sampler) in _DRAW_FROM_THEIR_GENERATOR:
            sampler = copy(sampler)
            sampler.generator = torch.Generator().manual_seed(seed)  # type: ignore[attr-defined]
            yield from self._share(list(sampler), consumed, end)
        else:
            yield from self._deal(_draw_isolated(sampler, seed), consumed, end)

    def _share(self, order: Sequence[Any], consumed: int, end: OrderEnd) -> Iterator[Any]:
        """This rank's items of an order that is known."""
        end.length = len(order)
        mine = order[consumed + self.rank :: self.num_replicas]
        left = max(0, len(order) - consumed)
        if self.drop_last:
            return iter(mine[: left // self.num_replicas])
        if len(mine) * self.num_replicas < left:
            return chain(mine, [order[(consumed + len(mine) * self.num_replicas + self.rank) % len(order)]])
        return iter(mine)

    def _deal(self, order: Iterator[Any], consumed: int, end: OrderEnd) -> Iterator[Any]:
        """This rank's items of an order that is still being drawn, and may never end."""
        head = list(islice(order, self.num_replicas))
        order = islice(chain(head, order), consumed, None)
        while group := list(islice(order, self.num_replicas)):
            consumed += len(group)
            if len(group) < self.num_replicas:
                end.length = consumed
            if self.rank < len(group):
                if len(group) == self.num_replicas or not self.drop_last:
                    yield group[self.rank]
            elif not self.drop_last:
                yield head[(self.rank - len(group)) % len(head)]


def _draw_isolated(sampler: Iterable[Any], seed: int) -> Iterator[Any]:
    """What `sampler` yields when the random number generators that it draws from start from `seed`."""
    isolated = IsolatedRandom(seed, _generators_of(sampler))
    with isolated:
        iterator = iter(sampler)
    while True:
        with isolated:
            block = list(islice(iterator, _BLOCK))
        if not block:
            return
        yield from block


def _generators_of(sampler: object) -> list[torch.Generator]:
    """The PyTorch generators that a sampler, or one inside it, holds as attributes."""
    found: list[torch.Generator] = []
    for value in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
        if isinstance(value, torch.Generator):
            found.append(value)
        elif isinstance(value, Sampler):
            found += _generators_of(value)
    return found
