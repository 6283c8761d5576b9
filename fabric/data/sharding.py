# SPDX-License-Identifier: Apache-2.0
"""Giving each rank its share of a loader."""

import sys
from collections.abc import Iterable, Iterator
from copy import copy
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from fabric.data.share import Dealt
from fabric.data.worker_seeds import seeded
from fabric.utilities.data import has_iterable_dataset
from fabric.utilities.distributed import DistributedSamplerWrapper
from fabric.utilities.seed import workers_are_seeded

_ENTRY = "_fabric_sharding"


class Sharding(NamedTuple):
    """What was replaced in the copy of a loader.

    Args:
        original: The user's loader.
        sampler: Decides the order.
        dealt: How its items are dealt over the ranks.
        generator: What the copy draws the seeds of its workers from.
        seeds_here: Whether each batch has a seed of its own and is made in this process.
    """

    original: DataLoader[Any]
    sampler: DistributedSamplerWrapper
    dealt: Dealt
    generator: torch.Generator
    seeds_here: bool

    @staticmethod
    def of(loader: Any) -> "Sharding | None":
        """That of a loader that came from `shard_dataloader`; None for anything else."""
        found: Sharding | None = vars(loader).get(_ENTRY) if isinstance(loader, DataLoader) else None
        return found


def sampling_seed(loader: Any) -> int:
    """The seed that the user chose for the order of a loader: that of its `generator`, else the process's."""
    if not isinstance(loader, DataLoader):
        return torch.initial_seed()
    candidates = (getattr(loader.sampler, "generator", None), loader.generator)
    generator = next((g for g in candidates if isinstance(g, torch.Generator)), None)
    return torch.initial_seed() if generator is None else generator.initial_seed()


def shard_dataloader(loader: DataLoader[Any], *, num_replicas: int, rank: int, seed: int) -> DataLoader[Any]:
    """A shallow copy of a loader that yields one rank's share, in an order that (seed, epoch) alone decide.

    The sampler, or a batch sampler of the user's own, is kept and its items are dealt over the ranks: rank `r` of `n`
    takes `order[r::n]`, so that a global batch holds the same samples for every number of ranks. Ends that do not go
    round are padded by wrapping around, or cut with `drop_last`. Everything else stays as it is; the user's loader is
    not touched and its constructor is not run again. Workers get other seeds in each rank and epoch.

    Returned as they are: loaders over an `IterableDataset`, which has no order to deal, and loaders whose sampler is
    distributed already (a `DistributedSampler`, or one with `num_replicas` and `rank`).

    Args:
        loader: The user's loader.
        num_replicas: Number of ranks that read different data.
        rank: This one.
        seed: Equal on all ranks.
    """
    if has_iterable_dataset(loader) or _is_distributed(loader.batch_sampler) or _is_distributed(loader.sampler):
        return loader
    kind = _SeededSampler if workers_are_seeded() and loader.num_workers > 0 else DistributedSamplerWrapper
    # The loader's constructor left a default sampler beside a batch sampler of the user's: only this one is in use.
    in_use = "sampler" if loader.batch_sampler is None else "batch_sampler"
    dealt = _Dealer(kind, num_replicas, rank, seed).deal(getattr(loader, in_use))
    order = dealt.sampler if isinstance(dealt, _BatchSampler) else dealt
    generator = torch.Generator()
    entries: dict[str, Any] = {in_use: dealt, "generator": generator, "_iterator": None}
    if loader.batch_size is not None:
        entries["sampler"] = order
    entries[_ENTRY] = Sharding(
        original=loader,
        sampler=order,
        dealt=Dealt(num_replicas, rank, dealt.batch_size if isinstance(dealt, _BatchSampler) else None),
        generator=generator,
        seeds_here=workers_are_seeded() and loader.num_workers == 0,
    )
    # `DataLoader.__setattr__` refuses samplers, and there is no public way: this is the one place that goes around it.
    sharded = copy(loader)
    vars(sharded).update(entries)
    return sharded


def _is_distributed(sampler: Any) -> bool:
    if sampler is None:
        return False
    if isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")):
        return True
    return _is_distributed(getattr(sampler, "sampler", None))  # a batch sampler need not be a `BatchSampler`


def is_plain(batch_sampler: Any) -> bool:
    """Whether a batch sampler makes a batch of each `batch_size` indices in turn: PyTorch's, or that of `torchdata`."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader.sampler")
    kind = type(batch_sampler)
    return kind is BatchSampler or (torchdata is not None and kind is torchdata.BatchSampler)


class _Dealer(NamedTuple):
    kind: type[DistributedSamplerWrapper]
    num_replicas: int
    rank: int
    seed: int

    def deal(self, sampler: Any) -> "DistributedSamplerWrapper | _BatchSampler":
        """Deal the indices inside a plain `BatchSampler`, and the items, whatever they are, of anything else."""
        if not is_plain(sampler):
            return self._wrap(self.kind, sampler, drop_last=bool(getattr(sampler, "drop_last", False)))
        # The indices are dealt by the plain kind: seeds belong to batches.
        indices = self._wrap(DistributedSamplerWrapper, sampler.sampler, drop_last=sampler.drop_last)
        seeds = self.kind is _SeededSampler
        return _BatchSampler(indices, sampler.batch_size, sampler.drop_last, seeds=seeds)

    def _wrap(
        self, kind: type[DistributedSamplerWrapper], sampler: Iterable[Any], *, drop_last: bool
    ) -> DistributedSamplerWrapper:
        return kind(sampler, self.num_replicas, self.rank, seed=self.seed, drop_last=drop_last)


class _BatchSampler(BatchSampler):
    """PyTorch's, but the order is fixed when an iteration starts and not when its first batch is asked for.

    So iterators over one loader, such as `zip(loader, loader)`, do not take each other's epoch.
    """

    sampler: DistributedSamplerWrapper

    def __init__(self, sampler: DistributedSamplerWrapper, batch_size: int, drop_last: bool, *, seeds: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self._seeds = seeds

    def __iter__(self) -> Iterator[list[int]]:
        order = self.sampler
        first = order.consumed // (order.num_replicas * self.batch_size)
        batches = self._batches(iter(order))
        return seeded(batches, _entropy(order), first) if self._seeds else batches

    def _batches(self, indices: Iterator[int]) -> Iterator[list[int]]:
        while batch := list(islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch


class _SeededSampler(DistributedSamplerWrapper):
    """Its items seed the worker that receives them."""

    def __iter__(self) -> Iterator[Any]:
        first = self.consumed // self.num_replicas
        return seeded(super().__iter__(), _entropy(self), first)


def _entropy(order: DistributedSamplerWrapper) -> tuple[int, ...]:
    return order.seed, order.epoch, order.rank  # the epoch of now: it may advance before the first batch
