# SPDX-License-Identifier: Apache-2.0
"""One rank's and worker's part of an iterable data set."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from fabric.data.source import Stated, restarted_if_over
from fabric.utilities.seed import IsolatedRandom, derive_seed, seed_batch

_OWN = "_fabric_"


class Cut(NamedTuple):
    """Which samples of a data set are this rank's.

    Args:
        num_replicas: Number of ranks to split it over; 1 where it is left whole.
        rank: This one.
        over_workers: Whether to split over a loader's workers too.
        seed: What the random numbers follow.
        entropy: Further numbers that they depend on: the rank, where the ranks' data sets differ already.
        starts_alike: Whether what the data set draws when it starts follows these numbers.
        seeds_samples: Whether each sample gets its own seed.
        tells_epoch: Whether to tell the data set the epoch.
        batch: Samples that make a batch.
    """

    num_replicas: int
    rank: int
    over_workers: bool
    seed: int
    entropy: tuple[int, ...]
    starts_alike: bool
    seeds_samples: bool
    tells_epoch: bool
    batch: int


class Resume(NamedTuple):
    """Where to go on.

    Args:
        states: For each worker that has yielded, its state after the last batch that the user saw.
        following: The worker that makes the next batch.
        ended: The epoch of the states is over.
    """

    states: Mapping[int, Any]
    following: int = 0
    ended: bool = False


class Part(IterableDataset[Any]):
    """Yields this rank's and worker's samples of a data set, and knows the state after each.

    [Note: one stream, many readers] Rank `r` of `n` with worker `w` of `m` takes every `n * m`-th sample, beginning
    with number `r * m + w`. So the data set has to yield the same samples to all of them: its random numbers are the
    same when it starts, and where each sample has its own seed, before each sample.

    In a worker only what collates the batches draws from them too; elsewhere they are the same at the start alone.

    It lies in a loader in the place of the data set, whose attributes it shows, so that a `worker_init_fn` finds them.

    Args:
        dataset: The user's.
        cut: Which samples to yield.
        epoch: One integer, which may change between iterations; in shared memory where workers outlive them.
        resume: Where the first iteration starts.
    """

    _fabric_dataset: Any
    _fabric_cut: Cut
    _fabric_epoch: Tensor
    _fabric_resume: Resume | None
    _fabric_read: int
    _fabric_over: bool

    def __init__(self, dataset: Any, cut: Cut, epoch: Tensor, resume: Resume | None) -> None:
        vars(self).update(_fabric_dataset=dataset, _fabric_cut=cut, _fabric_epoch=epoch, _fabric_resume=resume)
        vars(self).update(_fabric_read=0, _fabric_over=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_OWN) or (name.startswith("__") and name.endswith("__")):  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._fabric_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(_OWN):
            vars(self)[name] = value
        else:
            setattr(self._fabric_dataset, name, value)

    def fabric_state(self) -> dict[str, Any]:
        """The data set's own state, how many of its samples were read, and whether it had no more."""
        data = deepcopy(self._fabric_dataset.state_dict())
        return {"data": data, "read": self._fabric_read, "over": self._fabric_over}

    def __iter__(self) -> Iterator[Any]:
        resume, self._fabric_resume = self._fabric_resume or Resume({}), None
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        cut = self._fabric_cut
        if worker < resume.following:
            yield from [SKIPPED] * cut.batch  # a batch of another worker comes first
        split = workers if cut.over_workers else 1
        mine, every = cut.rank * split + (worker if cut.over_workers else 0), cut.num_replicas * split
        differing = (*cut.entropy, worker) if workers > 1 and not cut.over_workers else cut.entropy
        entropy = (cut.seed, int(self._fabric_epoch), *differing)
        samples = self._samples(resume.states.get(worker), entropy, ended=resume.ended)
        for number, sample in enumerate(samples, self._fabric_read):
            self._fabric_read = number + 1
            if number % every == mine:
                yield sample
        self._fabric_over = True

    def _samples(self, state: Any, entropy: tuple[int, ...], *, ended: bool) -> Iterator[Any]:
        """All samples of the data set, from a state on."""
        dataset = self._fabric_dataset
        if self._fabric_cut.tells_epoch:
            dataset.set_epoch(int(self._fabric_epoch))
        self._fabric_read, self._fabric_over = 0, False
        start = partial(self._started, entropy)
        if state is None:
            return start()
        dataset.load_state_dict(deepcopy(state["data"]))
        if ended:
            return restarted_if_over(start)
        self._fabric_read = state["read"]
        if not state["over"]:
            return start()
        if list(islice(start(), 1)):  # it begins the next epoch right away, which is for the next iteration
            dataset.load_state_dict(deepcopy(state["data"]))
        return iter(())

    def _started(self, entropy: tuple[int, ...]) -> Iterator[Any]:
        """An iterator over the data set. See [Note: one stream, many readers]."""
        cut, dataset = self._fabric_cut, self._fabric_dataset
        if cut.seeds_samples:
            return _with_seeds(iter(dataset), entropy, self._fabric_read)
        if not cut.starts_alike:
            return iter(dataset)
        if get_worker_info() is not None:
            seed_batch(derive_seed(*entropy))
            return iter(dataset)
        with IsolatedRandom(derive_seed(*entropy)):
            samples = iter(dataset)
            return chain(list(islice(samples, 1)), samples)


class StatefulPart(Part):
    """A part that has the methods which `torchdata` looks for."""

    def state_dict(self) -> dict[str, Any]:
        """The state after the sample that was yielded last."""
        return self.fabric_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration start from there."""
        info = get_worker_info()
        # `torchdata` keeps by itself whether the data was over.
        self._fabric_resume = Resume({0 if info is None else info.id: {**state, "over": False}})


class _Skipped:
    """Stands for a sample of a batch that is not handed on."""


SKIPPED = _Skipped()


class Stating:
    """In a loader's worker: the place of `collate_fn`, which also notes the state after the batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Stated:
        info = get_worker_info()
        assert info is not None
        if samples is SKIPPED or (isinstance(samples, list) and samples and samples[0] is SKIPPED):
            return Stated(None, None)
        batch = self._collate(samples)
        part: Any = info.dataset
        return Stated(batch, (info.id, part.fabric_state()))


def _with_seeds(samples: Iterator[Any], entropy: tuple[int, ...], first: int) -> Iterator[Any]:
    number = first
    while True:
        seed_batch(derive_seed(*entropy, number))
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample
        number += 1


def epoch_cell(*, shared: bool) -> Tensor:
    """One integer that a `Part` reads its epoch from."""
    cell = torch.zeros((), dtype=torch.int64)
    return cell.share_memory_() if shared else cell
