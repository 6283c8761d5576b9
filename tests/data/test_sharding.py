# SPDX-License-Identifier: Apache-2.0
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabric.data import _FabricDataLoader, sampling_seed, shard_dataloader


class Numbers(Dataset[int]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class DrawsFromEverywhere(Sampler[int]):
    """Random numbers from each of the global generators."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(10):
            yield random.randrange(100) + int(np.random.randint(100)) + int(torch.randint(100, ()))

    def __len__(self) -> int:
        return 10


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(1000, ()))


class RandomBatches(Sampler[list[int]]):
    """A batch sampler of the user's own, with batches of several sizes."""

    def __init__(self, generator: torch.Generator | None = None, drop_last: bool = False) -> None:
        self.generator = generator
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        for size in torch.randint(1, 4, (7,), generator=self.generator).tolist():
            yield torch.randint(20, (size,), generator=self.generator).tolist()

    def __len__(self) -> int:
        return 7


def wrap(loader: DataLoader[Any], n: int = 1, rank: int = 0, seed: int = 0) -> Any:
    return _FabricDataLoader(shard_dataloader(loader, num_replicas=n, rank=rank, seed=seed), move=None)


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(lists: list[list[int]]) -> list[int]:
    return [index for each in lists for index in each]


def over_ranks(make: Any, n: int, epochs: int = 1) -> list[list[list[int]]]:
    """The batches of each rank in the last epoch, each rank with other random numbers behind it."""
    result = []
    for rank in range(n):
        torch.manual_seed(1000 + rank)
        random.seed(2000 + rank)
        np.random.seed(3000 + rank)
        loader = wrap(make(), n, rank)
        for _ in range(epochs):
            last = batches(loader)
        result.append(last)
    return result


def global_batches(ranks: list[list[list[int]]]) -> list[list[int]]:
    """What the ranks see together in each step, in the global order."""
    return [[index for group in zip(*step, strict=True) for index in group] for step in zip(*ranks, strict=True)]


SAMPLERS = {
    "shuffle": lambda size: DataLoader(Numbers(24), batch_size=size, shuffle=True),
    "sequential": lambda size: DataLoader(Numbers(24), batch_size=size),
    "weighted": lambda size: DataLoader(
        Numbers(24), batch_size=size, sampler=WeightedRandomSampler(torch.arange(1.0, 25.0), 24)
    ),
    "subset": lambda size: DataLoader(Numbers(48), batch_size=size, sampler=SubsetRandomSampler(range(0, 48, 2))),
    "with replacement": lambda size: DataLoader(
        Numbers(24), batch_size=size, sampler=RandomSampler(Numbers(24), replacement=True, num_samples=48)
    ),
    "list": lambda size: DataLoader(Numbers(24), batch_size=size, sampler=list(range(23, -1, -1))),
    "generator": lambda size: DataLoader(
        Numbers(24), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "batch sampler": lambda size: DataLoader(
        Numbers(24), batch_sampler=BatchSampler(RandomSampler(Numbers(24)), size, drop_last=False)
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_global_batch_holds_the_same_samples_for_every_number_of_ranks(name: str) -> None:
    make = SAMPLERS[name]
    alone = over_ranks(lambda: make(12), 1, epochs=2)[0]
    assert global_batches(over_ranks(lambda: make(6), 2, epochs=2)) == alone
    assert global_batches(over_ranks(lambda: make(3), 4, epochs=2)) == alone


def test_a_shuffled_epoch_holds_each_sample_once_and_every_epoch_has_another_order() -> None:
    loader = wrap(DataLoader(Numbers(), batch_size=5, shuffle=True))
    epochs = [flat(batches(loader)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def epoch_3(seed: int) -> list[list[int]]:
        loader = wrap(DataLoader(Numbers(), batch_size=5, shuffle=True), seed=seed)
        loader.set_epoch(3)
        return batches(loader)

    torch.manual_seed(1)
    first = epoch_3(0)
    torch.manual_seed(2)
    assert epoch_3(0) == first
    assert epoch_3(1) != first


def test_a_loader_that_did_not_shuffle_keeps_its_order() -> None:
    loader = wrap(DataLoader(Numbers(6), batch_size=2))
    assert batches(loader) == batches(loader) == [[0, 1], [2, 3], [4, 5]]
    assert type(loader.sampler.sampler) is SequentialSampler


@pytest.mark.parametrize("sampler", [DrawsFromEverywhere(), RandomBatches()])
def test_custom_samplers_are_dealt_and_leave_the_random_numbers_alone(sampler: Any) -> None:
    key = "batch_sampler" if isinstance(sampler, RandomBatches) else "sampler"
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    ranks = [batches(wrap(DataLoader(Numbers(300), **{key: sampler}), 2, rank)) for rank in (0, 1)]
    alone = batches(wrap(DataLoader(Numbers(300), **{key: sampler})))
    dealt = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert dealt[: len(alone)] == alone
    assert dealt[len(alone) :] == alone[: len(dealt) - len(alone)]
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()
    assert torch.equal(states[2], torch.get_rng_state())


def test_a_custom_samplers_own_generator_is_isolated() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    loader = wrap(DataLoader(Numbers(), batch_sampler=RandomBatches(generator)))
    first = batches(loader)
    assert torch.equal(generator.get_state(), before)
    assert batches(loader) != first
    loader.set_epoch(0)
    assert batches(loader) == first


def test_an_endless_sampler_is_dealt_lazily() -> None:
    ranks = [wrap(DataLoader(Numbers(1000), batch_size=2, sampler=Endless()), 2, rank) for rank in (0, 1)]
    alone = wrap(DataLoader(Numbers(1000), batch_size=4, sampler=Endless()))
    first = [[b.tolist() for b in islice(loader, 3)] for loader in ranks]
    assert global_batches(first) == [b.tolist() for b in islice(alone, 3)]
    with pytest.raises(TypeError, match=r"object of type 'Endless' has no len\(\)"):
        len(alone)


def test_a_sampler_is_told_the_epoch() -> None:
    class Epochs(Sampler[int]):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 2)

        def __len__(self) -> int:
            return 2

    loader = wrap(DataLoader(Numbers(), batch_size=2, sampler=Epochs()))
    assert [batches(loader) for _ in range(3)] == [[[0, 0]], [[1, 1]], [[2, 2]]]


@pytest.mark.parametrize(
    ("length", "n", "drop_last", "expected"),
    [
        (5, 2, False, [[[0, 2], [4]], [[1, 3], [0]]]),
        (5, 2, True, [[[0, 2]], [[1, 3]]]),
        (1, 3, False, [[[0]], [[0]], [[0]]]),
        (2, 3, False, [[[0]], [[1]], [[0]]]),
        (2, 3, True, [[], [], []]),
        (0, 2, False, [[], []]),
    ],
)
def test_ends_that_do_not_go_round(length: int, n: int, drop_last: bool, expected: list[list[list[int]]]) -> None:
    for rank in range(n):
        loader = wrap(DataLoader(Numbers(length), batch_size=2, drop_last=drop_last), n, rank)
        assert batches(loader) == expected[rank]
        assert len(loader) == len(expected[rank])
        sampler = list(range(length))  # the same through the path of custom samplers
        custom = wrap(DataLoader(Numbers(length), batch_size=2, sampler=sampler, drop_last=drop_last), n, rank)
        assert batches(custom) == expected[rank]


def test_drop_last_of_a_custom_batch_sampler_deals_full_rounds_only() -> None:
    ranks = [wrap(DataLoader(Numbers(), batch_sampler=RandomBatches(drop_last=True)), 2, rank) for rank in (0, 1)]
    assert [len(batches(loader)) for loader in ranks] == [3, 3]
    assert [len(loader) for loader in ranks] == [3, 3]


def test_without_batches_single_samples_are_dealt() -> None:
    ranks = [list(wrap(DataLoader(Numbers(5), batch_size=None), 2, rank)) for rank in (0, 1)]
    assert ranks == [[0, 2, 4], [1, 3, 0]]


def test_without_batches_a_batch_sampler_as_sampler_keeps_its_batches() -> None:
    class Lists(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return list(index)

    sampler = BatchSampler(SequentialSampler(Numbers(8)), 2, drop_last=False)
    ranks = [list(wrap(DataLoader(Lists(), batch_size=None, sampler=sampler), 2, rank)) for rank in (0, 1)]
    assert ranks == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


class _Pairs:
    """A batch sampler that is no `BatchSampler`."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(self.sampler)])


class _Own(Sampler[int]):
    num_replicas, rank = 2, 1

    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), num_replicas=2, rank=0)),
        DataLoader(
            Numbers(), batch_sampler=BatchSampler(DistributedSampler(Numbers(), num_replicas=2, rank=0), 2, False)
        ),
        DataLoader(Numbers(), batch_sampler=_Pairs(DistributedSampler(Numbers(), num_replicas=2, rank=0))),
        DataLoader(Numbers(), sampler=_Own()),
    ],
)
def test_a_loader_that_is_distributed_already_is_left_alone(loader: DataLoader[int]) -> None:
    assert shard_dataloader(loader, num_replicas=2, rank=0, seed=0) is loader


def test_a_stream_is_left_alone() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    loader = DataLoader(Stream())
    assert shard_dataloader(loader, num_replicas=2, rank=0, seed=0) is loader
    assert _FabricDataLoader(loader, move=None).loader is loader


def test_the_users_loader_is_not_touched_and_its_constructor_not_run_again() -> None:
    class Counting(DataLoader[int]):
        made = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            type(self).made += 1
            super().__init__(*args, **kwargs)

    generator = torch.Generator().manual_seed(3)
    loader = Counting(Numbers(), batch_size=2, shuffle=True, generator=generator)
    before, state = dict(vars(loader)), generator.get_state()
    sharded = wrap(loader, 2, 1)
    list(sharded)
    assert vars(loader) == before
    assert torch.equal(generator.get_state(), state)
    assert Counting.made == 1
    assert sharded.loader is loader


def test_setting_up_draws_nothing_from_the_process() -> None:
    loader = wrap(DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=0))
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_is_that_of_the_loaders_generator_or_of_the_process() -> None:
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(3)
    assert sampling_seed(DataLoader(Numbers(), shuffle=True)) == 7
    assert sampling_seed(DataLoader(Numbers(), shuffle=True, generator=generator)) == 3
    assert sampling_seed(DataLoader(Numbers(), sampler=RandomSampler(Numbers(), generator=generator))) == 3


def test_rank_out_of_bounds() -> None:
    with pytest.raises(ValueError, match=r"^`rank=2` is out of bounds: it goes from 0 to 1\.$"):
        shard_dataloader(DataLoader(Numbers()), num_replicas=2, rank=2, seed=0)
