# SPDX-License-Identifier: Apache-2.0
"""Batches that are fetched, and copied to the device, before the loop asks for them."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fabric.utilities.apply_func import apply_to_tensors


def prefetched(batches: Iterator[Any], move: Callable[[Any], Any], depth: int, device: torch.device) -> Iterator[Any]:
    """Keep the next `depth` batches ready while the loop works on one.

    On CUDA the copies run on a stream of their own, beside the computation, where they come from pinned memory
    (`DataLoader(pin_memory=True)`). A batch is for the stream that is current when it is handed over. Other devices
    have no second stream that PyTorch offers, or need no copy: there, batches are fetched ahead and moved as usual.

    The order is the loader's. An error of the loader, or of `move`, is raised in the place of its batch, after all
    batches before it. A loader without workers makes its batches in this process, thus up to `depth` of them earlier
    than it would otherwise: what it draws from the global random generators is drawn earlier too.

    Args:
        batches: An iterator of a loader.
        move: Brings a batch to the device.
        depth: How many batches to hold between two calls, at least 1.
        device: The device that `move` brings them to.
    """
    return _LookAhead(batches, _SideStream(move, device) if device.type == "cuda" else _InPlace(move), depth)


class _Mover(Protocol):
    def start(self, batch: Any) -> Any:
        """Begin to move a batch; returns what `finish` needs."""

    def finish(self, started: Any) -> Any:
        """The moved batch, ready for use."""


class _InPlace(NamedTuple):
    """Moves a batch when it is fetched."""

    move: Callable[[Any], Any]

    def start(self, batch: Any) -> Any:
        return self.move(batch)

    def finish(self, started: Any) -> Any:
        return started


class _Failure(NamedTuple):
    """Stands in the queue where the batch would."""

    error: Exception


class _LookAhead(Iterator[Any]):
    """Starts to move batches before they are asked for. Dropping it drops the loader's iterator and what it holds."""

    __slots__ = ("_batches", "_depth", "_mover", "_waiting")

    def __init__(self, batches: Iterator[Any], mover: _Mover, depth: int) -> None:
        self._batches: Iterator[Any] | None = batches  # None when there are no more
        self._mover = mover
        self._depth = depth
        self._waiting: deque[Any] = deque()

    def __next__(self) -> Any:
        while self._batches is not None and len(self._waiting) <= self._depth:
            self._fetch(self._batches)
        if not self._waiting:
            raise StopIteration
        first = self._waiting.popleft()
        if isinstance(first, _Failure):
            try:
                raise first.error
            finally:
                del first  # the traceback leads to this frame, and both would keep the loader's workers
        return self._mover.finish(first)

    def _fetch(self, batches: Iterator[Any]) -> None:
        try:
            self._waiting.append(self._mover.start(next(batches)))
        except StopIteration:
            self._batches = None
        except Exception as error:
            self._batches = None
            self._waiting.append(_Failure(error))


class _SideStream:
    """Copies on a stream of its own, and hands over to the stream that computes."""

    def __init__(self, move: Callable[[Any], Any], device: torch.device) -> None:
        self._move = move
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._hides_tensors = False

    def start(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        if self._hides_tensors:
            # The memory of those that are gone may be used again, but not before the work that reads them is done.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = self._move(batch)
            return moved, self._stream.record_event()

    def finish(self, started: tuple[Any, torch.cuda.Event]) -> Any:
        moved, copied = started
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        self._record(moved, current)
        return moved

    def _record(self, moved: Any, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` uses memory that it gave to the side stream."""

        def record(tensor: Tensor) -> Tensor:
            if not tensor.is_cuda:
                pass
            elif tensor.layout is torch.strided and not tensor.is_nested:
                tensor.record_stream(stream)
            else:  # sparse and nested ones are made of several, which have no common way to be told
                self._hides_tensors = True
            return tensor

        def record_other(data: Any) -> Any:
            if callable(own := getattr(data, "record_stream", None)):  # such as a graph of PyTorch Geometric
                own(stream)
                return data
            if callable(getattr(data, "to", None)) and not isinstance(data, Mapping | tuple):
                self._hides_tensors = True
            return NotImplemented

        apply_to_tensors(moved, record, record_other)
