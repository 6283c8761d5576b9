# SPDX-License-Identifier: Apache-2.0
import gc
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fabric.data.prefetch import _LookAhead, prefetched
from fabric.utilities.apply_func import move_data_to_device

CPU = torch.device("cpu")


def double(batch: Any) -> Any:
    return batch * 2


class Counted(Iterator[Any]):
    """Counts what was asked for; raises `error` in the place of batch `fails_at`."""

    def __init__(self, n: int, fails_at: int = -1, error: BaseException | None = None) -> None:
        self.n = n
        self.asked = 0
        self.fails_at = fails_at
        self.error = error or OSError("disk")

    def __next__(self) -> Any:
        if self.asked == self.n:
            raise StopIteration
        if self.asked == self.fails_at:
            raise self.error
        self.asked += 1
        return torch.tensor(self.asked - 1)


class Draws(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1) + index


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_all_batches_come_once_moved_and_in_order(n: int, depth: int) -> None:
    batches = prefetched(Counted(n), double, depth, CPU)
    assert [batch.item() for batch in batches] == [2 * i for i in range(n)]
    assert list(batches) == []


@pytest.mark.parametrize("depth", [1, 3])
def test_it_is_that_many_batches_ahead_and_no_more(depth: int) -> None:
    source = Counted(10)
    batches = prefetched(source, double, depth, CPU)
    assert source.asked == 0
    for yielded in range(1, 11):
        next(batches)
        assert source.asked == min(10, yielded + depth)


def test_batches_are_moved_when_they_are_fetched_and_finished_when_they_are_asked_for() -> None:
    said: list[tuple[str, int]] = []

    class Mover:
        def start(self, batch: Any) -> Any:
            said.append(("start", batch.item()))
            return batch

        def finish(self, started: Any) -> Any:
            said.append(("finish", started.item()))
            return started

    list(_LookAhead(Counted(3), Mover(), 1))
    assert said == [("start", 0), ("start", 1), ("finish", 0), ("start", 2), ("finish", 1), ("finish", 2)]


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_an_error_comes_in_the_place_of_its_batch(depth: int) -> None:
    batches = prefetched(Counted(5, fails_at=3), double, depth, CPU)
    assert [next(batches).item() for _ in range(3)] == [0, 2, 4]
    with pytest.raises(OSError, match=r"^disk$"):
        next(batches)
    assert list(batches) == []


def test_an_error_of_the_move_too() -> None:
    def move(batch: Tensor) -> Tensor:
        if batch == 2:
            raise RuntimeError("no memory")
        return batch

    batches = prefetched(Counted(5), move, 2, CPU)
    assert [next(batches).item() for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match=r"^no memory$"):
        next(batches)


def test_an_interrupt_comes_at_once() -> None:
    batches = prefetched(Counted(5, fails_at=1, error=KeyboardInterrupt()), double, 2, CPU)
    with pytest.raises(KeyboardInterrupt):
        next(batches)


def test_an_error_of_a_worker_keeps_its_place() -> None:
    loader = DataLoader(Failing(), batch_size=1, num_workers=1)
    batches = prefetched(iter(loader), double, 2, CPU)
    assert [next(batches).item() for _ in range(3)] == [0, 2, 4]
    with pytest.raises(ValueError, match=re.escape("sample 3")):
        next(batches)
    del batches
    gc.collect()  # PyTorch's iterator is part of the traceback


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ValueError("sample 3")
        return index


def test_nothing_is_held_but_what_is_ahead() -> None:
    seen: list[Any] = []

    def move(batch: Tensor) -> Tensor:
        moved = batch * 2
        seen.append(weakref.ref(moved))
        return moved

    batches = prefetched(Counted(6), move, 2, CPU)
    for _ in range(3):
        batch = next(batches)
    del batch
    assert [reference() is not None for reference in seen] == [False, False, False, True, True]
    del batches
    assert not any(reference() is not None for reference in seen)


def test_closing_early_ends_the_loaders_workers() -> None:
    loader = DataLoader(Draws(), batch_size=1, num_workers=1)
    for _ in prefetched(iter(loader), double, 2, CPU):
        break
    gc.collect()  # the fixture that watches for processes says whether they are gone


def test_the_end_lets_go_of_the_loaders_iterator() -> None:
    source = Counted(2)
    gone = weakref.ref(source)
    batches = prefetched(source, double, 1, CPU)
    del source
    next(batches)
    assert gone() is not None
    assert [batch.item() for batch in batches] == [2]
    assert gone() is None


def test_the_loaders_own_draws_are_the_same() -> None:
    def draw(depth: int | None) -> list[Tensor]:
        torch.manual_seed(3)
        batches = iter(DataLoader(Draws(), batch_size=2, shuffle=True))
        return list(batches if depth is None else prefetched(batches, lambda batch: batch, depth, CPU))

    expected = draw(None)
    for depth in (1, 4):
        assert all(torch.equal(a, b) for a, b in zip(draw(depth), expected, strict=True))


class Opaque:
    """Nobody can see its tensor but by its `.to`."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any, non_blocking: bool = False) -> "Opaque":
        return Opaque(self.x.to(device, non_blocking=non_blocking))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("opaque", [False, True])
def test_copies_run_beside_the_computation_and_are_never_overwritten(opaque: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    n, size = 12, 4 * 1024 * 1024

    def make(index: int) -> Any:
        x = torch.full((size,), float(index)).pin_memory()
        return (
            {"x": Opaque(x), "rest": [(x[:1], "text"), torch.eye(2).to_sparse()]}
            if opaque
            else {"x": x, "rest": [(x[:1], "text")]}
        )

    batches = prefetched(map(make, range(n)), lambda batch: move_data_to_device(batch, device), 2, device)
    sums = []
    for batch in batches:
        x = batch["x"].x if opaque else batch["x"]
        torch.cuda._sleep(5_000_000)  # the loop falls behind; what it reads must not be overwritten meanwhile
        sums.append((x.double().sum() / size, batch["rest"][0][0]))
        del batch, x
    torch.cuda.synchronize()
    assert [(total.item(), first.item()) for total, first in sums] == [(float(i), float(i)) for i in range(n)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_does_not_wait_for_the_computation() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = (torch.ones(1024).pin_memory() for _ in range(4))
    batches = prefetched(source, lambda batch: move_data_to_device(batch, device), 1, device)
    next(batches)
    torch.cuda._sleep(10**9)
    next(batches)  # starts the third copy, on the side stream
    side = batches._mover._stream  # type: ignore[attr-defined]
    side.synchronize()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
