# SPDX-License-Identifier: Apache-2.0
"""Reading a `DataLoader` over a data set with indices."""

import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from typing_extensions import override

from fabric.data.place import Place
from fabric.data.sharding import Sharding, is_plain
from fabric.data.share import Dealt, Share
from fabric.data.source import Reading, Source
from fabric.data.worker_seeds import SeededHere, seeded
from fabric.utilities.distributed import DistributedSamplerWrapper
from fabric.utilities.seed import IsolatedRandom, derive_seed, workers_are_seeded


class IndexedSource(Source):
    """Batches by index: any place is reached in constant time, unless the loader has an `__iter__` of its own.

    Args:
        loader: A loader, from `shard_dataloader` or as the user made it.
        reading: How to read it.
    """

    def __init__(self, loader: DataLoader[Any], reading: Reading) -> None:
        self._loader = loader
        self._rank = reading.ranks.rank
        self._sharding = Sharding.of(loader)
        self._length: int | None = None
        self._watched: DistributedSamplerWrapper | None = None
        self._dealt = self._dealt_already() if self._sharding is None else self._sharding.dealt
        self.epoch_holders = epoch_holders(loader)
        self.followers = takers_of_epochs([loader.dataset])
        self._seeds = self._sharding is None and reading.shard and workers_are_seeded()
        self._rest = _Rest(_index_sampler(loader))
        if self._seeds:
            self.seed = reading.seed
            self._seeded = _with_rest(loader, self._rest)  # one copy, whose workers may outlive an iteration
        if self._sharding is not None:
            self.stride = self._sharding.dealt.stride
            self.seed = self._sharding.sampler.seed
        if self._sharding is None or not iterates_as_usual(loader):
            sampler, size = _sampler_and_batch_size(loader)
            dealt = self._dealt or Dealt(getattr(sampler, "num_replicas", 1), 0, size)
            self.layout = {"ranks": dealt.num_replicas, "batch_size": dealt.batch_size}

    @override
    def start(self, place: Place, *, ahead: bool) -> Iterator[Any]:
        if self._sharding is None:
            return self._start_unsharded(place)
        sampler = self._sharding.sampler
        self._sharding.generator.manual_seed(derive_seed(sampler.seed, place.epoch, sampler.rank))
        place.end = sampler.watch()
        batches = self._start_sharded(place, sampler)
        if self._sharding.seeds_here:
            return SeededHere(batches, (sampler.seed, place.epoch, sampler.rank), place.consumed // self.stride)
        return batches

    def _start_sharded(self, place: Place, sampler: DistributedSamplerWrapper) -> Iterator[Any]:
        if place.position == 0 and place.consumed == 0:
            return iter(self._loader)
        if not iterates_as_usual(self._loader):
            return self._replay(place)
        sampler.skip(place.consumed)
        try:
            return iter(self._loader)
        finally:
            sampler.skip(0)

    def _start_unsharded(self, place: Place) -> Iterator[Any]:
        place.end = None if self._watched is None else self._watched.watch()
        if place.position == 0:
            return self._from(0, place)
        with IsolatedRandom(derive_seed(place.epoch, place.position)):  # PyTorch draws a seed for its workers
            skipped = place.position if iterates_as_usual(self._loader) else 0
            batches = self._from(skipped, place)
            for _ in islice(batches, place.position - skipped):
                pass
        return batches

    def _from(self, skipped: int, place: Place) -> Iterator[Any]:
        """An iterator that leaves out the first batches without loading them."""
        if not self._seeds:
            loader = _with_rest(self._loader, _Rest(self._rest.sampler, skipped)) if skipped else self._loader
            return iter(loader)
        entropy = (self.seed, place.epoch, self._rank)
        self._rest.skipped, self._rest.entropy = skipped, entropy if self._loader.num_workers else None
        batches = iter(self._seeded)
        return batches if self._loader.num_workers else SeededHere(batches, entropy, skipped)

    def _replay(self, place: Place) -> Iterator[Any]:
        """A loader with an `__iter__` of its own alone knows which batch comes when: let it run up to the place."""
        with IsolatedRandom(derive_seed(place.epoch)):
            batches = iter(self._loader)
            for _ in islice(batches, place.position):
                pass
        return batches

    @override
    def share(self, place: Place) -> Share:
        if self._dealt is None:
            return Share(None, interleaved=False)
        length = self._length if place.end is None else place.end.length
        before = (place.consumed if self._sharding else place.position * self._dealt.stride) - self._dealt.stride
        return self._dealt.share(before, length)

    @override
    def adopt_seed(self, seed: int | None) -> None:
        if self.seed is not None and seed is not None:
            self.seed = seed
            if self._sharding is not None:
                self._sharding.sampler.seed = seed

    @override
    def resume_counts(self, place: Place) -> None:
        if self._sharding is not None:
            place.position = place.consumed // self.stride

    @override
    def validate_resumable(self, place: Place) -> None:
        if self._sharding is None and place.position and not self._knows_its_order():
            raise RuntimeError(
                f"The loader was saved after {place.position} batches of epoch {place.epoch}, and it was set up with"
                f" `use_distributed_sampler=False`: its order (by `{type(self._loader.sampler).__name__}`) can't"
                " be drawn again. Give its sampler a `set_epoch`, or let `setup_dataloaders` shard it."
            )

    def _dealt_already(self) -> Dealt | None:
        """How a loader that is distributed already deals, where its sampler is one that we know."""
        sampler, size = _sampler_and_batch_size(self._loader)
        if type(sampler) is DistributedSampler:
            self._length = None if sampler.drop_last else len(sampler.dataset)  # type: ignore[arg-type]
        elif type(sampler) is DistributedSamplerWrapper:
            self._watched = None if sampler.drop_last else sampler
        else:
            return None
        return Dealt(sampler.num_replicas, sampler.rank, size)

    def _knows_its_order(self) -> bool:
        samplers = (self._loader.sampler, getattr(self._loader.batch_sampler, "sampler", None))
        return bool(self.epoch_holders) or any(type(sampler) is SequentialSampler for sampler in samplers)


def epoch_holders(loader: DataLoader[Any]) -> list[Any]:
    """What has to be told the epoch: the samplers, and a loader that asks for it."""
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    samplers = [getattr(batch_sampler, "sampler", None), sampler, batch_sampler]
    users = [getattr(each, "sampler", None) for each in samplers if isinstance(each, DistributedSamplerWrapper)]
    return takers_of_epochs([*samplers, *users, loader])


def takers_of_epochs(candidates: list[Any]) -> list[Any]:
    """Those that have a `set_epoch`, each once."""
    unique = {id(candidate): candidate for candidate in candidates}.values()
    return [candidate for candidate in unique if callable(getattr(candidate, "set_epoch", None))]


def iterates_as_usual(loader: DataLoader[Any]) -> bool:
    """Whether the `__iter__` of a loader is PyTorch's or that of `torchdata`, which takes a batch for each item."""
    own = type(loader).__iter__
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return own is DataLoader.__iter__ or (torchdata is not None and own is torchdata.StatefulDataLoader.__iter__)


def _sampler_and_batch_size(loader: DataLoader[Any]) -> tuple[Any, int | None]:
    """What decides the order, and how many of its items make a batch; None where one item does."""
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        return loader.sampler, None
    return (batch_sampler.sampler, batch_sampler.batch_size) if is_plain(batch_sampler) else (batch_sampler, None)


def _index_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _with_rest(loader: DataLoader[Any], rest: "_Rest") -> DataLoader[Any]:
    """A copy of a loader that reads the rest of its sampler."""
    shortened = copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(shortened).update({name: rest, "_iterator": None})
    return shortened


@dataclass
class _Rest:
    """A sampler without its first items, which carry seeds where there is what these depend on."""

    sampler: Any
    skipped: int = 0
    entropy: tuple[int, ...] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not there yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __iter__(self) -> Iterator[Any]:
        items = islice(iter(self.sampler), self.skipped, None)
        return items if self.entropy is None else seeded(items, self.entropy, self.skipped)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.skipped)
