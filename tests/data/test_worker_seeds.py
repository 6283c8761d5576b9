# SPDX-License-Identifier: Apache-2.0
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, SequentialSampler, get_worker_info

from fabric.data import Ranks, Reading, _FabricDataLoader
from fabric.utilities.seed import seed_everything
from tests.data.test_sharding import wrap


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[int]:
        return [index, random.randrange(2**31), int(np.random.randint(2**31)), int(torch.randint(2**31, ()))]


class WorkerSeeds(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return get_worker_info().seed


class Lists(BatchSampler):
    """A batch sampler of the user's own."""


class Arrays(Lists):
    """Yields what is neither a list nor a number."""

    def __iter__(self) -> Iterator[Any]:
        return map(np.asarray, super().__iter__())


@pytest.fixture
def seeded_workers() -> Iterator[None]:
    seed_everything(5, workers=True, verbose=False)
    yield
    seed_everything(5, verbose=False)


def rows(loader: Any) -> list[Any]:
    return [torch.as_tensor(batch).tolist() for batch in map(_stacked, loader)]


def _stacked(batch: Any) -> Any:
    return torch.stack([torch.as_tensor(part) for part in batch])


def test_workers_differ_between_ranks_workers_and_epochs() -> None:
    seeds = []
    for rank in (0, 1):
        loader = wrap(DataLoader(WorkerSeeds(), batch_size=None, num_workers=2), 2, rank)
        seeds += [seed for _ in range(2) for seed in loader]
    assert len(set(seeds)) == 8


def _mark(worker_id: int) -> None:
    get_worker_info().dataset.mark = worker_id + 1


class Marked(WorkerSeeds):
    mark = 0

    def __getitem__(self, index: int) -> int:
        return self.mark


def test_the_users_worker_init_fn_is_called() -> None:
    loader = wrap(DataLoader(Marked(), batch_size=None, num_workers=2, worker_init_fn=_mark))
    assert list(loader) == [1, 2, 1, 2]


KINDS = {
    "batches": {"batch_size": 2},
    "single samples": {"batch_size": None},
    "custom batches": {"batch_sampler": Lists(SequentialSampler(Augmented()), 2, False)},
    "arrays": {"batch_sampler": Arrays(SequentialSampler(Augmented()), 2, False)},
}


@pytest.mark.usefixtures("seeded_workers")
@pytest.mark.parametrize("kind", KINDS)
def test_augmentation_follows_seed_epoch_and_batch_but_not_the_workers(kind: str) -> None:
    def make(workers: int, **kwargs: Any) -> Any:
        return wrap(DataLoader(Augmented(), num_workers=workers, **KINDS[kind], **kwargs), 2, 1)

    one, two = make(1), make(2, persistent_workers=True, prefetch_factor=3)
    first, second = rows(one), rows(one)
    assert rows(two) == first
    assert rows(two) == second
    assert str(first) != str(second)
    drawn = [value for batch in first for value in torch.tensor(batch).flatten().tolist()]
    assert len(set(drawn)) > 0.7 * len(drawn)

    resumed = make(2)
    resumed.load_state_dict({"epoch": 1, "position": 1, "consumed": one._source.stride, "seed": 0})
    assert rows(resumed) == second[1:]


@pytest.mark.usefixtures("seeded_workers")
def test_a_sampler_that_is_distributed_already_is_seeded_too() -> None:
    def make(rank: int, **kwargs: Any) -> Any:
        sampler = DistributedSampler(Augmented(), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        loader = DataLoader(Augmented(), batch_size=2, sampler=sampler, **kwargs)
        return _FabricDataLoader(loader, reading=Reading(Ranks(2, rank), seed=3))

    loader = make(1)
    first, second = rows(loader), rows(loader)
    workers = make(1, num_workers=2, persistent_workers=True)
    assert [rows(workers), rows(workers)] == [first, second]
    assert all(a[1:] != b[1:] for a, b in zip(first, rows(make(0)), strict=True))
    for kwargs in ({}, {"num_workers": 1}):
        resumed = make(1, **kwargs)
        resumed.load_state_dict({"epoch": 1, "position": 2, "consumed": 2, "seed": 3})
        assert rows(resumed) == second[2:]


@pytest.mark.usefixtures("seeded_workers")
def test_ranks_augment_differently() -> None:
    ranks = [rows(wrap(DataLoader(Augmented(), batch_size=2, num_workers=1), 2, rank)) for rank in (0, 1)]
    assert all(a[1:] != b[1:] for a, b in zip(*ranks, strict=True))


@pytest.mark.usefixtures("seeded_workers")
@pytest.mark.parametrize("kind", KINDS)
def test_without_workers_augmentation_is_the_same_and_the_process_is_not_seeded(kind: str) -> None:
    loader = wrap(DataLoader(Augmented(), **KINDS[kind]), 2, 1)
    with_workers = wrap(DataLoader(Augmented(), num_workers=1, **KINDS[kind]), 2, 1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first, second = rows(loader), rows(loader)
    assert [first, second] == [rows(with_workers), rows(with_workers)]
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    loader.load_state_dict({"epoch": 1, "position": 2, "consumed": 2 * loader._source.stride, "seed": 0})
    assert rows(loader) == second[2:]


def test_without_seeded_workers_augmentation_draws_from_the_process() -> None:
    loader = wrap(DataLoader(Augmented(), batch_size=2))
    torch.manual_seed(3)
    expected = [int(torch.randint(2**31, ())) for _ in range(2)]
    torch.manual_seed(3)
    batch = next(iter(loader))
    assert batch[3].tolist() == expected


@pytest.mark.usefixtures("seeded_workers")
def test_indices_that_carry_seeds_are_lists_and_numbers() -> None:
    batches = wrap(DataLoader(Augmented(), batch_size=5, num_workers=1)).batch_sampler
    assert list(batches) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert all(isinstance(batch, list) for batch in batches)
    assert list(wrap(DataLoader(Augmented(), batch_size=None, num_workers=1)).sampler) == list(range(12))
