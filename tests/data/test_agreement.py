# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fabric.data import Share
from tests.data.test_streams import Plain, Stateful
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


class PerRank(IterableDataset[int]):
    """Splits itself: so many samples on each rank, and perhaps an error after them."""

    def __init__(self, lengths: list[int], rank: int, world_size: int, broken: bool = False) -> None:
        self.length, self.rank, self.world_size, self.broken = lengths[rank], rank, world_size, broken

    def __iter__(self) -> Iterator[int]:
        yield from range(self.rank * 100, self.rank * 100 + self.length)
        if self.broken:
            raise ValueError("a broken sample")


class PerRankStateful(PerRank):
    def __iter__(self) -> Iterator[int]:
        start, self.start = getattr(self, "start", 0), 0
        for number in range(start, self.length):
            self.last = number
            yield self.rank * 100 + number

    def state_dict(self) -> dict[str, int]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["last"] + 1


class NoStart(PerRank):
    def __iter__(self) -> Iterator[int]:
        if self.broken:
            raise ValueError("no file")
        return super().__iter__()


def steps(loader: Any) -> list[Any]:
    return [(batch.tolist(), loader.share.valid) for batch in loader]


def error_of(loader: Any) -> str:
    seen: list[Any] = []
    with pytest.raises((RuntimeError, ValueError)) as caught:
        seen.extend(batch.tolist() for batch in loader)
    return f"{len(seen)} batches, {str(caught.value).strip().splitlines()[-1]}"


def loops(context: Any, workers: int) -> dict[str, Any]:
    fabric = context.fabric(strategy="ddp")
    rank, n = context.rank, context.world_size

    def loader(dataset: Any, **kwargs: Any) -> Any:
        return fabric.setup_dataloaders(DataLoader(dataset, batch_size=2, num_workers=workers), **kwargs)

    found: dict[str, Any] = {}
    split = loader(Plain(5))
    found["split"] = steps(split)
    found["again"] = steps(split) == found["split"]
    found["share"] = split.share
    uneven = loader(PerRank([7, 2], rank, n))
    found["pad"] = steps(uneven)
    for _ in range(2):  # the ranks' votes stay in step after each way to leave
        for index, _ in enumerate(uneven):
            if index == 1:
                break
        next(iter(uneven))
    found["after break"] = steps(uneven) == found["pad"]
    found["both"] = [(a.tolist(), b.tolist()) for a, b in zip(loader(Plain(4)), loader(Plain(8)), strict=False)]
    found["stop"] = steps(loader(PerRank([7, 2], rank, n), uneven="stop"))
    found["empty"] = steps(loader(PerRank([0, 0], rank, n)))
    found["nothing"] = error_of(loader(PerRank([3, 0], rank, n)))
    found["error"] = error_of(loader(PerRank([9, 2], rank, n, broken=rank == 1)))
    found["first error"] = error_of(loader(PerRank([3, 0], rank, n, broken=rank == 1)))
    found["no start"] = error_of(loader(NoStart([3, 3], rank, n, broken=rank == 1)))
    found["late error"] = error_of(loader(PerRank([9, 3], rank, n, broken=rank == 0)))
    fabric.barrier()
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_take_the_same_number_of_steps(workers: int) -> None:
    first, second = run_ranks(2, loops, workers)
    assert first["split"] == [([0, 2], None), ([4], None)]
    assert second["split"] == [([1, 3], None), ([1, 3], 0)]
    assert (first["share"], second["share"]) == (Share(None, True), Share(0, True))
    assert first["pad"] == [([0, 1], None), ([2, 3], None), ([4, 5], None), ([6], None)]
    assert second["pad"] == [([100, 101], None), *[([100, 101], 0)] * 3]
    assert first["stop"] == [([0, 1], None)]
    assert second["stop"] == [([100, 101], None)]
    assert first["both"] == [([0, 2], [0, 2])]
    assert second["both"] == [([1, 3], [1, 3])]
    for rank in (first, second):
        assert rank["again"]
        assert rank["after break"]
        assert rank["empty"] == []
        assert rank["nothing"] == (
            "0 batches, `fabric.setup_dataloaders(...)`: some ranks have no data at all in this epoch, and nothing to"
            " repeat while the others have some. Give the data set at least one sample for each rank, or end all ranks"
            " together with `setup_dataloaders(..., uneven='stop')`."
        )
    other = "The loader of another rank failed to make its next batch; its own error says why."
    broken = "ValueError: a broken sample" if workers else "a broken sample"
    assert (first["error"], second["error"]) == (f"1 batches, {other}", f"1 batches, {broken}")
    assert (first["first error"], second["first error"]) == (f"0 batches, {other}", f"0 batches, {broken}")
    no_file = "ValueError: no file" if workers else "no file"
    assert (first["no start"], second["no start"]) == (f"0 batches, {other}", f"0 batches, {no_file}")
    assert (first["late error"], second["late error"]) == (f"4 batches, {broken}", f"4 batches, {other}")


def resumes(context: Any, workers: int) -> list[Any]:
    """From every place on, also those at which rank 1 has no data left."""
    fabric = context.fabric(strategy="ddp")

    def make() -> Any:
        dataset = PerRankStateful([9, 3], context.rank, context.world_size)
        return fabric.setup_dataloaders(DataLoader(dataset, batch_size=2, num_workers=workers))

    loader = make()
    whole, states = [], []
    for batch in loader:
        whole.append((batch.tolist(), loader.share.valid))
        states.append(loader.state_dict())
    for position, state in enumerate(states[:-1], 1):
        resumed = make()
        resumed.load_state_dict(state)
        rest = steps(resumed)
        assert [valid for _, valid in rest] == [valid for _, valid in whole[position:]], (position, rest)
        assert [b for b, valid in rest if valid is None] == [b for b, valid in whole[position:] if valid is None]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert steps(resumed) == whole
    split = fabric.setup_dataloaders(DataLoader(Stateful(11), batch_size=2, num_workers=workers))
    iterator = iter(split)
    next(iterator)
    fabric.save("state.pt", {"loader": split})
    rest = [batch.tolist() for batch in iterator]
    fresh = fabric.setup_dataloaders(DataLoader(Stateful(11), batch_size=2, num_workers=workers))
    fabric.load("state.pt", {"loader": fresh})
    return [rest, [batch.tolist() for batch in fresh]]


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_of_several_ranks_go_on(workers: int) -> None:
    for before, after in run_ranks(2, resumes, workers):
        assert before == after


def mutates(context: Any) -> list[Any]:
    fabric = context.fabric(strategy="ddp")
    dataset = PerRank([5, 2], context.rank, context.world_size)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=2, collate_fn=_named))
    seen = []
    for batch in loader:
        seen.append(batch.pop("x").add_(1).tolist())
        assert batch == {}
    return seen


def _named(samples: list[int]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(samples)}


def test_a_repetition_is_not_what_the_loop_made_of_the_batch() -> None:
    assert run_ranks(2, mutates) == [[[1, 2], [3, 4], [5]], [[101, 102]] * 3]


def sharded(context: Any) -> Any:
    fabric = context.fabric(strategy="ddp")
    plain = fabric.setup_dataloaders([1, 2, 3])
    alone = fabric.setup_dataloaders(DataLoader(Plain(3), batch_size=2), use_distributed_sampler=False)
    return list(plain), [batch.tolist() for batch in alone] if context.rank == 0 else None


def test_what_is_not_sharded_needs_no_other_rank() -> None:
    assert run_ranks(2, sharded) == [([1, 2, 3], [[0, 1], [2]]), ([1, 2, 3], None)]
