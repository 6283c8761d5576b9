# SPDX-License-Identifier: Apache-2.0
"""The progress bar of `fabric.progress`: counting, rates and time left. How it looks is in `displays`."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any

from torch import Tensor

from fabric.data import Placed, _FabricDataLoader
from fabric.watching.displays import Display, State


class ProgressBar:
    """Goes through an iterable and shows how far it is. Made by `fabric.progress`.

    The step costs a look at the clock. Metrics are kept as they are given and turned into numbers only when the bar is
    drawn, so that a tensor on a GPU is not waited for at each step.

    Args:
        iterable: What to go through; None for a bar that `update` alone moves.
        total: Number of items; by default `len(iterable)`, where it has one.
        description: Stands before the bar.
        unit: What an item is called.
        samples: Samples in an item (over all ranks), for the samples per second; 0 leaves them out.
        display: Draws the bar; None on the ranks that show nothing.
        clock: The time in seconds.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None,
        *,
        total: int | None,
        description: str,
        unit: str,
        samples: int,
        display: Display | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._iterable = iterable
        self._display = display
        self._clock = clock
        self._state = State(description, unit, samples, total=length_of(iterable) if total is None else total)
        self._metrics: dict[str, Any] = {}
        self._drawn: deque[tuple[float, int]] = deque(maxlen=10)
        self._next = 0.0
        self._open = self._entered = False

    def __iter__(self) -> Iterator[Any]:
        if self._iterable is None:
            raise TypeError("`fabric.progress()` has nothing to go through. Pass an iterable, or move it by `update`.")
        return iter(self._iterable) if self._display is None else self._shown(self._iterable)

    def __len__(self) -> int:
        if self._state.total is None:
            raise TypeError("This progress bar has no length. Pass `total=` to `fabric.progress`.")
        return self._state.total

    def _shown(self, iterable: Iterable[Any]) -> Generator[Any, None, None]:
        items = iter(iterable)
        if self._open:  # going through it twice at once is shown once
            yield from items
            return
        self._start(first_of(iterable))
        try:
            while True:
                yield next(items)  # kept nowhere: the loop alone decides how long a batch lives
                self.update()
        except StopIteration:
            self._stop(whole=True)
        except BaseException:  # `break` too, which looks the same here as an error in the loop
            self._stop(whole=False)
            raise

    # moving it by hand

    def __enter__(self) -> "ProgressBar":
        self._entered = True
        if self._display is not None and self._iterable is None:  # going through an iterable opens the bar
            self._start(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        self._stop(whole=kind is None)

    def update(self, n: int = 1) -> None:
        """Move on by `n` items. Going through the iterable does so by itself; nothing moves when it is over.

        Args:
            n: Number of items.

        Raises:
            RuntimeError: On every rank, for a bar without an iterable that was not entered.
        """
        if self._iterable is None and not self._entered:
            raise RuntimeError("`update()` moves a bar that is open. Write `with fabric.progress(total=...) as bar:`.")
        if not self._open:
            return
        self._state.done += n
        now = self._clock()
        if now >= self._next:
            self._draw(now)

    def show(self, **metrics: Any) -> None:
        """Show numbers beside the bar, from the next time on that it is drawn.

        Args:
            **metrics: Numbers, tensors of one element or texts, under the names to show.

        Raises:
            ValueError: On every rank, if a tensor has more or less than one element.
        """
        for name, value in metrics.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"`show({name}=...)` needs one number, but got a tensor of shape {tuple(value.shape)}."
                        " Reduce it first, for example with `.mean()`."
                    )
                metrics[name] = value.detach()  # not the graph behind it
        if self._display is not None:
            self._metrics |= metrics

    # drawing

    def _start(self, first: int) -> None:
        assert self._display is not None
        now = self._clock()
        self._state.begin(first)
        self._metrics.clear()
        self._drawn.clear()
        self._drawn.append((now, first))
        self._next = now + self._display.interval
        self._open = True
        self._display.open(self._state)

    def _draw(self, now: float) -> None:
        assert self._display is not None
        self._next = now + self._display.interval
        self._measure(now)
        self._read_metrics()
        self._display.draw(self._state)

    def _read_metrics(self) -> None:
        self._state.metrics = "  ".join(f"{name} {_shown_as(value)}" for name, value in self._metrics.items())

    def _measure(self, now: float) -> None:
        since, count = self._drawn[0]
        if now > since:
            self._state.rate = (self._state.done - count) / (now - since)
        self._drawn.append((now, self._state.done))

    def _stop(self, whole: bool) -> None:
        """Draw for the last time. After an error no tensor is read: on a GPU that could raise, and hide the error."""
        if not self._open:
            return
        assert self._display is not None
        self._open = False
        self._measure(self._clock())
        try:
            if whole:
                self._read_metrics()
        finally:
            self._display.close(self._state)
            self._metrics.clear()


def _shown_as(value: Any) -> str:
    number = value.item() if isinstance(value, Tensor) else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def length_of(iterable: Iterable[Any] | None) -> int | None:
    """The number of items, where the iterable knows it."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a generator; a loader over a data set without a length
        return None


def first_of(iterable: Iterable[Any]) -> int:
    """The batches of the epoch that were seen before a loader was resumed; 0 for everything else.

    A loader says so once it has been started.
    """
    return iterable.place[1] if isinstance(iterable, Placed) else 0


def samples_of(iterable: Iterable[Any] | None, replicas: int) -> int:
    """The samples in a batch of a set-up loader, over `replicas` ranks; 0 where they are not known."""
    if not isinstance(iterable, _FabricDataLoader):
        return 0
    size = getattr(iterable, "batch_size", None)  # of the user's own object, which may be anything
    return size * replicas if isinstance(size, int) else 0
