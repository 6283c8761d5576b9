# SPDX-License-Identifier: Apache-2.0
import gc
import pickle
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from fabric.data import _FabricDataLoader, shard_dataloader
from tests.data.test_sharding import DrawsFromEverywhere, Endless, Numbers, RandomBatches, batches, wrap


def shuffled(length: int = 20, **kwargs: Any) -> DataLoader[int]:
    return DataLoader(Numbers(length), batch_size=3, shuffle=True, **kwargs)


def epoch(number: int, **kwargs: Any) -> list[list[int]]:
    loader = wrap(shuffled(), **kwargs)
    loader.set_epoch(number)
    return batches(loader)


def test_each_iteration_is_the_next_epoch_after_a_break_too() -> None:
    loader = wrap(shuffled())
    assert batches(loader) == epoch(0)
    for _ in loader:
        break
    assert batches(loader) == epoch(2)
    iterator = iter(loader)
    del iterator
    assert batches(loader) == epoch(4)


def test_a_left_iterator_that_is_still_held_does_not_stop_the_epochs() -> None:
    loader = wrap(shuffled())
    first = iter(loader)
    next(first)
    assert batches(loader) == epoch(1)
    assert [batch.tolist() for batch in first] == epoch(0)[1:]
    assert batches(loader) == epoch(2)


def test_two_iterators_at_once_do_not_take_each_others_epoch() -> None:
    loader = wrap(shuffled())
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert [a for a, _ in pairs] == epoch(0)
    assert [b for _, b in pairs] == epoch(1)


@pytest.mark.parametrize("through", ["loader", "sampler", "batch_sampler.sampler"])
def test_set_epoch_of_the_users_wins(through: str) -> None:
    loader = wrap(shuffled())
    target = loader
    for name in through.split(".") if through != "loader" else ():
        target = getattr(target, name)
    for _ in range(2):  # the same epoch again
        target.set_epoch(5)
        assert batches(loader) == epoch(5)
    assert batches(loader) == epoch(6)
    for index, _ in enumerate(loader):
        if index == 1:
            break
    target.set_epoch(7)
    assert batches(loader) == epoch(7)


class Rotated(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % 20 for index in range(4)])


class NumbersWithEpochs(Numbers):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_set_epoch_of_a_sampler_that_was_given_to_the_loader_wins() -> None:
    sampler = Rotated()
    loader = wrap(DataLoader(Numbers(), batch_size=2, sampler=sampler))
    for chosen in (2, 7):
        sampler.set_epoch(chosen)
        assert batches(loader) == [[chosen, chosen + 1], [chosen + 2, chosen + 3]]
    assert batches(loader) == [[8, 9], [10, 11]]
    assert sampler.epoch == loader.sampler.epoch == 9


def test_a_data_set_with_indices_follows_one_loader_and_the_users_choice_stands() -> None:
    dataset = NumbersWithEpochs()
    loader, other = (wrap(DataLoader(dataset, batch_size=3, shuffle=True)) for _ in range(2))
    assert [batches(loader), batches(other), batches(loader)] == [epoch(0), epoch(0), epoch(1)]
    assert dataset.epoch == 2
    dataset.set_epoch(7)
    assert batches(loader) == epoch(2)
    assert dataset.epoch == 7


def test_the_users_distributed_sampler_is_advanced_and_its_set_epoch_wins() -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0, shuffle=True)
    loader = _FabricDataLoader(DataLoader(Numbers(), batch_size=4, sampler=sampler), move=None)
    seen = [batches(loader) for _ in range(3)]
    assert sampler.epoch == 3
    assert len({str(each) for each in seen}) == 3
    sampler.set_epoch(1)
    assert batches(loader) == seen[1]
    assert loader.sampler is sampler


def test_a_data_set_with_epochs_is_advanced() -> None:
    class Stream(IterableDataset[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch])

    loader = _FabricDataLoader(DataLoader(Stream()), move=None)
    assert [batches(loader) for _ in range(3)] == [[[0]], [[1]], [[2]]]


def test_state_counts_the_batches_that_were_yielded() -> None:
    loader = wrap(shuffled(), 2, 0, seed=9)
    assert loader.state_dict() == {"epoch": 0, "position": 0, "consumed": 0, "seed": 9}
    seen = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["position"], state["consumed"]) for state in seen] == [
        (0, 1, 6),
        (0, 2, 12),
        (0, 3, 18),
        (0, 4, 24),
    ]
    assert loader.state_dict() == {"epoch": 1, "position": 0, "consumed": 0, "seed": 9}


def test_state_stays_in_the_epoch_after_a_break_until_the_next_iteration() -> None:
    loader = wrap(shuffled())
    for index, _ in enumerate(loader):
        if index == 1:
            break
    gc.collect()
    assert loader.state_dict() == {"epoch": 0, "position": 2, "consumed": 6, "seed": 0}
    iterator = iter(loader)
    assert loader.state_dict() == {"epoch": 1, "position": 0, "consumed": 0, "seed": 0}
    del iterator
    loader.set_epoch(4)
    assert loader.state_dict() == {"epoch": 4, "position": 0, "consumed": 0, "seed": 0}


LOADERS: dict[str, Any] = {
    "shuffled": shuffled,
    "custom sampler": lambda: DataLoader(Numbers(300), batch_size=2, sampler=DrawsFromEverywhere()),
    "custom batches": lambda: DataLoader(Numbers(), batch_sampler=RandomBatches()),
    "weighted": lambda: DataLoader(
        Numbers(24), batch_size=3, sampler=WeightedRandomSampler(torch.arange(1.0, 25.0), 20)
    ),
    "single samples": lambda: DataLoader(Numbers(9), batch_size=None, shuffle=True, collate_fn=torch.tensor),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 3, True)),
    "workers": lambda: shuffled(num_workers=1),
    "persistent workers": lambda: shuffled(num_workers=1, persistent_workers=True, prefetch_factor=4),
    "drop last": lambda: shuffled(drop_last=True),
}


@pytest.mark.parametrize("position", [0, 1, 2, "all"])
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("n", [1, 2])
def test_resume(name: str, position: int | str, n: int) -> None:
    """In a new process with another seed: the rest of the epoch, then the next ones."""
    make = LOADERS[name]
    loader = wrap(make(), n, n - 1, seed=3)
    batches(loader)
    seen, state = [], None
    for index, batch in enumerate(loader):
        seen.append(batch.tolist())
        if index + 1 == position:
            state = pickle.loads(pickle.dumps(loader.state_dict()))
        if position == "all":
            state = loader.state_dict()
    following = batches(loader)

    resumed = wrap(make(), n, n - 1, seed=4)
    if position == 0:
        state = {"epoch": 1, "position": 0, "consumed": 0, "seed": 3}
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    rest = seen[len(seen) if position == "all" else int(position) :]
    assert batches(resumed) == rest
    assert batches(resumed) == following
    assert len(resumed) == len(seen)


def test_resume_counts_on() -> None:
    loader = wrap(shuffled())
    loader.load_state_dict({"epoch": 2, "position": 3, "consumed": 9, "seed": 0})
    states = [loader.state_dict() for _ in loader]
    assert states[0] == {"epoch": 2, "position": 4, "consumed": 12, "seed": 0}
    assert loader.state_dict()["epoch"] == 3


def test_resume_loads_no_sample_twice() -> None:
    class Watched(Numbers):
        loaded: list[int]

        def __getitem__(self, index: int) -> int:
            self.loaded.append(index)
            return index

    dataset = Watched()
    dataset.loaded = []
    loader = wrap(DataLoader(dataset, batch_size=3))
    loader.load_state_dict({"epoch": 0, "position": 4, "consumed": 12, "seed": 0})
    list(loader)
    assert dataset.loaded == list(range(12, 20))


def test_resume_keeps_the_position_when_the_user_sets_the_same_epoch() -> None:
    state = {"epoch": 2, "position": 3, "consumed": 9, "seed": 0}
    loader = wrap(shuffled())
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert batches(loader) == epoch(2)[3:]
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert batches(loader) == epoch(1)


def test_resume_on_another_number_of_ranks_goes_on_with_the_unseen_samples() -> None:
    loader = wrap(DataLoader(Numbers(24), batch_size=3, shuffle=True), 4, 0)
    order = [i for b in batches(wrap(DataLoader(Numbers(24), batch_size=12, shuffle=True))) for i in b]
    next(iter(loader))
    state = loader.state_dict()
    ranks = [wrap(DataLoader(Numbers(24), batch_size=2, shuffle=True), 2, rank) for rank in (0, 1)]
    for rank in ranks:
        rank.load_state_dict(state)
    seen = [[index for batch in batches(rank) for index in batch] for rank in ranks]
    assert [index for pair in zip(*seen, strict=True) for index in pair] == order[12:]


def test_resume_of_an_endless_sampler() -> None:
    loader = wrap(DataLoader(Numbers(1000), batch_size=2, sampler=Endless()))
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    resumed = wrap(DataLoader(Numbers(1000), batch_size=2, sampler=Endless()))
    resumed.load_state_dict(state)
    assert [b.tolist() for b in islice(resumed, 3)] == [b.tolist() for b in islice(iterator, 3)]


def test_resume_of_a_loader_with_an_iter_of_its_own_lets_it_run() -> None:
    class Twice(DataLoader[int]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch
                yield -batch

    def make() -> Any:
        return wrap(Twice(Numbers(), batch_size=3, shuffle=True))

    loader = make()
    seen = []
    for index, batch in enumerate(loader):
        seen.append(batch.tolist())
        if index == 2:
            state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert batches(resumed) == seen[3:]
    assert torch.equal(torch.get_rng_state(), before)


def test_resume_of_a_distributed_sampler_of_the_users() -> None:
    def make() -> Any:
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=1, shuffle=True)
        loader = DataLoader(Numbers(), batch_size=3, sampler=sampler)
        return _FabricDataLoader(shard_dataloader(loader, num_replicas=2, rank=1, seed=0), move=None)

    loader = make()
    batches(loader)
    seen = batches(loader)
    resumed = make()
    resumed.load_state_dict({"epoch": 1, "position": 2, "consumed": 2, "seed": None})
    before = torch.get_rng_state()
    assert batches(resumed) == seen[2:]
    assert torch.equal(torch.get_rng_state(), before)
    assert batches(resumed) == batches(loader)


def test_resume_in_the_middle_of_an_order_that_is_not_known() -> None:
    loader = _FabricDataLoader(shuffled(), move=None)
    loader.load_state_dict({"epoch": 1, "position": 0, "consumed": 0, "seed": None})
    with pytest.raises(
        RuntimeError,
        match="^"
        + re.escape(
            "The loader was saved after 2 batches of epoch 1, and it was set up with `use_distributed_sampler=False`:"
            " its order (by `RandomSampler`) can't be drawn again. Give its sampler a `set_epoch`, or let"
            " `setup_dataloaders` shard it."
        )
        + "$",
    ):
        loader.load_state_dict({"epoch": 1, "position": 2, "consumed": 2, "seed": None})
    sequential = _FabricDataLoader(DataLoader(Numbers(6), batch_size=2), move=None)
    sequential.load_state_dict({"epoch": 1, "position": 2, "consumed": 2, "seed": None})
    assert batches(sequential) == [[4, 5]]


class _Own(DataLoader[int]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def _distributed(n: int) -> Any:
    sampler = DistributedSampler(Numbers(), num_replicas=n, rank=0)
    return _FabricDataLoader(DataLoader(Numbers(), batch_size=2, sampler=sampler))


COUNTED: dict[str, tuple[Any, Any, str, str]] = {
    "own __iter__": (
        lambda: wrap(_Own(Numbers(), batch_size=2), 2, 0),
        lambda: wrap(_Own(Numbers(), batch_size=8), 2, 0),
        "{'ranks': 2, 'batch_size': 2}",
        "{'ranks': 2, 'batch_size': 8}",
    ),
    "the user's sampler": (
        lambda: _distributed(2),
        lambda: _distributed(4),
        "{'ranks': 2, 'batch_size': 2}",
        "{'ranks': 4, 'batch_size': 2}",
    ),
    "left as it is": (
        lambda: _FabricDataLoader(DataLoader(Numbers(), batch_size=2)),
        lambda: _FabricDataLoader(DataLoader(Numbers(), batch_size=4)),
        "{'ranks': 1, 'batch_size': 2}",
        "{'ranks': 1, 'batch_size': 4}",
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_batches_that_are_counted_go_on_only_as_they_were_made(name: str) -> None:
    make, make_other, before, now = COUNTED[name]
    loader = make()
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(2)]
    state = loader.state_dict()
    text = (
        f"The loader was saved after 2 batches of epoch 0 with `{before}`, and now it has `{now}`: its batches are"
        " counted, and go on only with the same. Save at the end of an epoch to change them."
    )
    with pytest.raises(RuntimeError, match="^" + re.escape(text) + "$"):
        make_other().load_state_dict(state)
    make_other().load_state_dict({**state, "position": 0, "consumed": 0})
    again = make()
    again.load_state_dict(state)
    assert first + batches(again) == batches(make())


def test_resume_in_the_middle_of_a_stream() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    loader = _FabricDataLoader(DataLoader(Stream()), move=None)
    with pytest.raises(
        RuntimeError,
        match="^"
        + re.escape(
            "The loader was saved after 2 batches of epoch 1, and its data set is an `IterableDataset` (`Stream`)"
            " without a place to go to. Give it `state_dict` and `load_state_dict`, save at the end of an epoch, or"
            " load the first batches once more with `fabric.setup_dataloaders(..., replay=True)`."
        )
        + "$",
    ):
        loader.load_state_dict({"epoch": 1, "position": 2, "consumed": 2, "seed": None})
