# SPDX-License-Identifier: Apache-2.0
import copy
import pickle
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabric.data import Ranks, Reading, Share, _FabricDataLoader
from fabric.utilities.seed import seed_everything
from tests.data.test_sharding import Numbers, global_batches, wrap


class Plain(IterableDataset[int]):
    def __init__(self, length: int = 17) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


class Sized(Plain):
    def __len__(self) -> int:
        return self.length


class ByWorkers(Plain):
    """Splits itself over the workers, as PyTorch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(worker, self.length, workers)


class Stateful(Plain):
    """Goes on after the sample that was yielded last; at the end of an epoch that is nothing."""

    start = 0
    last = -1

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for number in range(start, self.length):
            self.last = number
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["last"] + 1


class Endless(Plain):
    """An epoch is the next `length` numbers."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield self.position - 1
            if self.position % self.length == 0:
                return

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Rewinding(Plain):
    """Begins anew as soon as it has ended."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Random(Plain):
    """Shuffled when it starts, and augmented."""

    def __iter__(self) -> Iterator[Any]:
        for number in random.sample(range(self.length), self.length):
            yield number, random.randrange(2**30), int(torch.randint(2**30, ()))


class RandomStateful(Stateful):
    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield number, random.randrange(2**30), int(torch.randint(2**30, ()))


class Epochs(Plain):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(self.epoch * 100, self.epoch * 100 + self.length)


def read(dataset: Any, n: int = 1, rank: int = 0, *, kind: Any = DataLoader, reading: Any = None, **kwargs: Any) -> Any:
    ranks = Ranks(n, rank, gather=lambda state: [(each, state[1]) for each in range(n)])
    loader = kind(dataset, **{"batch_size": 3, **kwargs})
    return _FabricDataLoader(loader, reading=Reading(ranks, **{"seed": 3, **(reading or {})}))


def batches(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def plain(batch: Any) -> Any:
    """Numbers, or where a sample is a tuple, rows."""
    if isinstance(batch, list) and isinstance(batch[0], torch.Tensor) and batch[0].dim():
        return [list(row) for row in zip(*(column.tolist() for column in batch), strict=True)]
    return torch.as_tensor(batch).tolist()


def flat(ranks: list[Any]) -> list[Any]:
    return sorted(sample for rank in ranks for batch in rank for sample in batch)


@pytest.fixture
def seeded_workers() -> Iterator[None]:
    seed_everything(5, workers=True, verbose=False)
    yield
    seed_everything(5, verbose=False)


@pytest.mark.parametrize("dataset", [Plain(), ByWorkers()], ids=["plain", "splits itself over workers"])
@pytest.mark.parametrize(("n", "workers"), [(1, 2), (2, 0), (2, 2), (3, 1)])
def test_each_sample_comes_once_over_ranks_and_workers(dataset: Any, n: int, workers: int) -> None:
    loaders = [read(dataset, n, rank, num_workers=workers) for rank in range(n)]
    assert flat([batches(loader) for loader in loaders]) == list(range(17))
    assert all(loader.dataset is dataset for loader in loaders)


def test_samples_are_dealt_in_turn() -> None:
    assert batches(read(Plain(), 2, 1)) == [[1, 3, 5], [7, 9, 11], [13, 15]]
    assert batches(read(Plain(), 2, 1, num_workers=2)) == [[2, 6, 10], [3, 7, 11], [14], [15]]
    assert [int(x) for x in read(Plain(5), 2, 1, batch_size=None)] == [1, 3]


def test_a_stream_that_is_left_alone() -> None:
    assert batches(read(Plain(4), 2, 1, reading={"shard": False})) == [[0, 1, 2], [3]]
    assert batches(read(Plain(2), 2, 1, num_workers=2, reading={"shard": False})) == [[0, 1], [0, 1]]
    own = Plain(4)
    own.rank, own.world_size = 1, 2  # type: ignore[attr-defined]
    assert batches(read(own, 2, 1)) == [[0, 1, 2], [3]]


def test_the_length_is_that_of_the_ranks_that_take_most_steps() -> None:
    for n, workers, uneven, drop_last in [
        (1, 2, "pad", False),
        (2, 0, "pad", False),
        (2, 2, "pad", True),
        (3, 0, "stop", False),
    ]:
        ranks = [
            read(Sized(19), n, rank, num_workers=workers, drop_last=drop_last, reading={"uneven": uneven})
            for rank in range(n)
        ]
        counts = [len(batches(rank)) for rank in ranks]
        assert [len(rank) for rank in ranks] == [max(counts) if uneven == "pad" else min(counts)] * n
    with pytest.raises(TypeError, match=r"^object of type 'Plain' has no len\(\)$"):
        len(read(Plain(), 2, 1))


def test_shares() -> None:
    assert read(Plain(), 2, 1).share is None
    for workers, interleaved in ((0, True), (1, True), (2, False)):
        loader = read(Plain(), 2, 1, num_workers=workers)
        next(iter(loader))
        assert loader.share == Share(None, interleaved)


def test_what_is_drawn_at_the_start_is_the_same_for_all_ranks_and_workers() -> None:
    seen = []
    for epoch in range(2):
        ranks = []
        for rank in range(2):
            random.seed(rank)
            torch.manual_seed(rank)
            loader = read(Random(), 2, rank, num_workers=2 * epoch)
            loader.set_epoch(epoch)
            before = random.getstate() if epoch else None
            ranks.append([[row[0] for row in batch] for batch in batches(loader)])
            assert before is None or random.getstate() == before
        assert flat(ranks) == list(range(17))
        seen.append([row for batch in ranks[0] for row in batch])
    assert sorted(seen[0]) != seen[0]


@pytest.mark.usefixtures("seeded_workers")
@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_follows_the_sample_and_leaves_the_process_alone(workers: int) -> None:
    def rows(n: int, rank: int, workers: int) -> dict[int, Any]:
        loader = read(Random(), n, rank, num_workers=workers)
        loader.set_epoch(4)
        state, default = random.getstate(), torch.get_rng_state()
        found = {row[0]: row[1:] for batch in batches(loader) for row in batch}
        assert random.getstate() == state
        assert torch.equal(torch.get_rng_state(), default)
        return found

    alone = rows(1, 0, 0)
    assert len({tuple(row) for row in alone.values()}) == len(alone) == 17
    assert {**rows(2, 0, workers), **rows(2, 1, workers)} == alone


def test_epochs_reach_persistent_workers_and_the_users_choice_wins() -> None:
    loader = read(Epochs(2), num_workers=1, persistent_workers=True)
    assert [batches(loader) for _ in range(2)] == [[[0, 1]], [[100, 101]]]
    loader.dataset.set_epoch(7)
    assert batches(loader) == [[700, 701]]
    assert batches(loader) == [[800, 801]]


class HiddenEpochs(Epochs):
    """Does not show its epoch."""

    epoch = property()  # type: ignore[assignment]

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield self._epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_not_shown_is_advanced_and_the_users_choice_wins(workers: int) -> None:
    loader = read(HiddenEpochs(), num_workers=workers)
    loader.dataset.set_epoch(0)
    assert [batches(loader) for _ in range(2)] == [[[0]], [[1]]]
    loader.dataset.set_epoch(7)
    assert batches(loader) == [[7]]


def check_resume(make: Any, positions: Any = (0, 1, 2, "all")) -> None:
    """Each place, in a new process, leads to the rest of the epoch and to the next one."""
    whole = make()
    first, second = batches(whole), batches(whole)
    for position in positions:
        loader, seen = make(), 0
        iterator = iter(loader)
        while seen != position and (batch := next(iterator, None)) is not None:
            del batch
            seen += 1
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        del iterator
        kept = copy.deepcopy(state)
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == kept
        expected = second if position == "all" else first[seen:]
        assert batches(resumed) == expected
        assert position == "all" or batches(resumed) == second
        assert state == kept


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [Stateful, Endless, Rewinding])
def test_resume_by_the_data_sets_own_state(kind: Any, n: int, batch_size: int | None) -> None:
    check_resume(lambda: read(kind(), n, n - 1, batch_size=batch_size))


@pytest.mark.parametrize("kind", [Stateful, Rewinding])
@pytest.mark.parametrize("persistent", [False, True])
def test_resume_by_the_states_of_the_workers(persistent: bool, kind: Any) -> None:
    def make() -> Any:
        return read(kind(23), 2, 1, num_workers=2, persistent_workers=persistent, prefetch_factor=3)

    check_resume(make, positions=(1, 2, 3, 4, "all"))


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_at_the_last_batch_of_an_epoch(workers: int) -> None:
    def make() -> Any:
        return read(Rewinding(7), num_workers=workers, batch_size=4)

    whole, states = [], []
    for batch in (loader := make()):
        whole.append(batch.tolist())
        states.append(loader.state_dict())
    for seen, state in enumerate(states, 1):
        resumed = make()
        resumed.load_state_dict(state)
        assert [batches(resumed), batches(resumed)] == [whole[seen:], whole]


def test_resume_when_a_worker_has_ended_before_the_others() -> None:
    class Uneven(Stateful):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
            for number in super().__iter__():
                if number % 4 == worker or (number % 4 > 1 and worker == workers - 1):
                    yield number

    check_resume(lambda: read(Uneven(), num_workers=2, batch_size=2), positions=(3, 5, 6))


@pytest.mark.usefixtures("seeded_workers")
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_augments_alike(workers: int) -> None:
    check_resume(lambda: read(RandomStateful(), 2, 0, num_workers=workers), positions=(1, 2))


def test_the_state_is_that_of_the_batches_that_were_yielded() -> None:
    class Ahead(DataLoader[int]):
        pass

    loader = read(Stateful(), kind=Ahead)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    state = loader.state_dict()
    assert state["streams"] == [
        {"workers": {0: {"data": {"last": 5}, "read": 6, "over": False}}, "next": 0, "num_workers": 0}
    ]
    assert (state["epoch"], state["position"]) == (0, 2)


def test_resume_after_break_and_in_the_same_process() -> None:
    loader = read(Stateful())
    for index, _ in enumerate(loader):
        if index == 1:
            break
    state = loader.state_dict()
    assert batches(loader)[0] == [0, 1, 2]
    loader.load_state_dict(state)
    assert batches(loader) == [[6, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16]]


@pytest.mark.parametrize("workers", [0, 2])
def test_replay(workers: int) -> None:
    check_resume(
        lambda: (
            read(Random(), 2, 1, num_workers=workers, reading={"replay": True})
            if workers
            else read(Plain(), 2, 1, reading={"replay": True})
        ),
        positions=(1, 2),
    )


def test_replay_draws_the_same_order_again() -> None:
    def order(loader: Any) -> list[Any]:
        return [[row[0] for row in batch] for batch in batches(loader)]

    def make() -> Any:
        return read(Random(), reading={"replay": True})

    whole = order(make())
    resumed = make()
    resumed.load_state_dict({"epoch": 0, "position": 2, "consumed": 2, "seed": 3})
    assert order(resumed) == whole[2:]


@pytest.mark.parametrize(("n", "kwargs"), [(4, {}), (2, {"num_workers": 2}), (2, {"batch_size": 2})])
def test_replay_counts_the_same_batches_only(n: int, kwargs: Any) -> None:
    loader = read(Plain(), 2, 0, reading={"replay": True})
    next(iter(loader))
    now = {"ranks": n, "num_workers": 0, "batch_size": 3, **kwargs}
    refused(
        read(Plain(), n, 0, reading={"replay": True}, **kwargs),
        loader.state_dict(),
        "The loader was saved after 1 batches of epoch 0 with `{'ranks': 2, 'num_workers': 0, 'batch_size': 3}`, and"
        f" now it has `{now}`: its batches are counted, and go on only with the same. Save at the end of an epoch to"
        " change them.",
    )


def refused(loader: Any, state: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match="^" + re.escape(text) + "$"):
        loader.load_state_dict(state)


def test_what_can_not_go_on_says_so() -> None:
    loader = read(Stateful(), 2, 1, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    refused(
        read(Stateful(), 2, 1),
        state,
        "The loader was saved in the middle of an epoch with `num_workers=2`, and now it has `num_workers=0`: a stream"
        " goes on only with as many as before.",
    )
    refused(
        read(Stateful(), 3, 1, num_workers=2),
        state,
        "The loader was saved in the middle of epoch 0 by 2 ranks, and 3 load it: a stream goes on only with as many as"
        " before. Save at the end of an epoch to change the number of ranks.",
    )

    class Own(DataLoader[int]):
        def __iter__(self) -> Any:
            yield from super().__iter__()

    own = read(Stateful(), kind=Own)
    next(iter(own))
    refused(
        read(Stateful(), kind=Own),
        own.state_dict(),
        "The loader was saved after 1 batches of epoch 0, and its data set is an `IterableDataset` (`Stateful`)"
        " without a place to go to. Give it `state_dict` and `load_state_dict`, save at the end of an epoch, or load"
        " the first batches once more with `fabric.setup_dataloaders(..., replay=True)`.",
    )


def test_workers_end_when_the_iteration_is_left() -> None:
    loader = read(Stateful(50), num_workers=1)
    for _ in loader:
        break
    assert batches(loader)[0] == [0, 1, 2]  # the fixture that watches for processes says whether they are gone


class TestHuggingFace:
    @staticmethod
    def stream(buffer: int = 0, shards: int = 4) -> Any:
        datasets = pytest.importorskip("datasets")
        numbers = datasets.Dataset.from_dict({"a": list(range(22))}).to_iterable_dataset(num_shards=shards)
        return numbers.map(_double).shuffle(seed=1, buffer_size=buffer) if buffer else numbers.map(_double)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_it_is_split_by_node_and_resumes_by_its_own_state(self, workers: int) -> None:
        parts = []
        for rank in range(2):

            def make(rank: int = rank) -> Any:
                return Values(read(self.stream(), 2, rank, num_workers=workers))

            check_resume(make, positions=(1, 3) if rank else (2, "all"))
            parts.append(batches(make()))
        assert flat(parts) == list(range(0, 44, 2))

    def test_epochs_shuffle_and_the_users_choice_wins(self) -> None:
        dataset = self.stream(buffer=30)
        loader = Values(read(dataset, 2, 1))
        first, second = batches(loader), batches(loader)
        assert first != second
        dataset.set_epoch(0)
        assert batches(loader) == first
        assert dataset.epoch == 1

    def test_a_buffer_that_loses_samples_is_refused_or_replayed(self) -> None:
        loader = Values(read(self.stream(buffer=5)))
        whole = batches(loader)
        loader = Values(read(self.stream(buffer=5)))
        next(iter(loader))
        refused(
            read(self.stream(buffer=5)),
            loader.state_dict(),
            "The loader was saved after 1 batches of epoch 0, and its data set shuffles in a buffer"
            " (`dataset.shuffle(buffer_size=...)`), whose samples `datasets` does not keep. Shuffle in another way,"
            " save at the end of an epoch, or load the first batches once more with"
            " `fabric.setup_dataloaders(..., replay=True)`.",
        )
        replayed = Values(read(self.stream(buffer=5), reading={"replay": True}))
        replayed.load_state_dict(loader.state_dict())
        assert batches(replayed) == whole[1:]


def _double(row: dict[str, int]) -> dict[str, int]:
    return {"a": row["a"] * 2}


class Values:
    """A loader of dictionaries with one entry."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return (batch["a"] for batch in self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
class TestTorchdata:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_stream_in_a_stateful_loader(self, workers: int) -> None:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

        def make(rank: int = 1) -> Any:
            return read(Stateful(23), 2, rank, kind=kind, num_workers=workers)

        assert flat([batches(make(rank)) for rank in range(2)]) == list(range(23))
        check_resume(make, positions=(0, 1, 3, "all"))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_data_with_indices_in_a_stateful_loader(self, workers: int) -> None:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

        def make(n: int = 2, rank: int = 1, size: int = 3) -> Any:
            loader = kind(Numbers(24), batch_size=size, shuffle=True, num_workers=workers)
            return wrap(loader, n, rank)

        check_resume(make, positions=(0, 2, "all"))
        ranks = [batches(make(2, rank)) for rank in range(2)]
        assert global_batches(ranks) == batches(make(1, 0, 6))
        loader = make()
        next(iter(loader))
        resumed = make(1, 0, 6)
        resumed.load_state_dict(loader.state_dict())
        assert batches(resumed) == batches(make(1, 0, 6))[1:]

    def test_persistent_workers(self) -> None:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        check_resume(lambda: read(Stateful(), kind=kind, num_workers=1, persistent_workers=True), positions=(2,))

    def test_nodes(self) -> None:
        nodes = pytest.importorskip("torchdata.nodes")

        def make() -> Any:
            return _FabricDataLoader(nodes.Loader(nodes.Batcher(nodes.IterableWrapper(range(10)), 3, drop_last=False)))

        check_resume(make)
