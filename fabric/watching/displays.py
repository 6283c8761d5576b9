# SPDX-License-Identifier: Apache-2.0
"""How a progress bar looks: rich, tqdm, or plain lines where nobody watches a terminal. All write to stderr."""

import os
import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from fabric.utilities.imports import is_installed, require_extra

KINDS = ("auto", "rich", "tqdm", "lines")


@dataclass
class State:
    """What a bar shows.

    Attributes:
        description: Stands first.
        unit: What an item is called.
        samples: Samples in an item; 0 if they are not known.
        total: Number of items; None if it is not known.
        done: Items that are done.
        rate: Items per second; None before two looks at the clock.
        metrics: The user's numbers as text.
    """

    description: str
    unit: str
    samples: int = 0
    total: int | None = None
    done: int = 0
    rate: float | None = None
    metrics: str = ""

    def begin(self, first: int) -> None:
        """Go back to the start."""
        self.done, self.rate, self.metrics = first, None, ""

    def amount(self) -> str:
        """How many of how many."""
        return f"{self.done}" if self.total is None else f"{self.done}/{self.total}"

    def numbers(self) -> str:
        """Everything behind the amount."""
        parts = []
        if self.rate:
            parts.append(_speed(self.rate, self.unit))
            if self.samples:
                parts.append(_speed(self.rate * self.samples, "samples"))
            if self.total is not None and self.total > self.done:
                parts.append(f"{_duration((self.total - self.done) / self.rate)} left")
        return "  ".join([*parts, self.metrics] if self.metrics else parts)

    def line(self) -> str:
        """All of it as one line of text."""
        percent = f"{100 * self.done // self.total}%" if self.total else ""
        head = f"{self.description}:" if self.description else ""
        return "  ".join(filter(None, (head, self.amount(), percent, self.numbers())))


def _speed(rate: float, unit: str) -> str:
    number, per = (rate, f"{unit}/s") if rate >= 1 else (1 / rate, f"s/{unit}")
    return f"{number:.3g} {per}" if number < 1000 else f"{number:.0f} {per}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display(ABC):
    """Draws one bar.

    Attributes:
        interval: Seconds between two drawings.
    """

    interval: float = 0.1

    @abstractmethod
    def open(self, state: State) -> None:
        """Draw for the first time."""

    @abstractmethod
    def draw(self, state: State) -> None:
        """Draw again."""

    @abstractmethod
    def close(self, state: State) -> None:
        """Draw for the last time and leave the terminal as it was found."""


class Lines(Display):
    """A line of text at the start, at the end, and now and then in between."""

    interval = 10.0

    @override
    def open(self, state: State) -> None:
        self.draw(state)

    @override
    def draw(self, state: State) -> None:
        print(state.line(), file=sys.stderr, flush=True)  # noqa: T201

    @override
    def close(self, state: State) -> None:
        self.draw(state)


class Screen:
    """The bars of one process on its terminal. Bars that are open at once stand below each other."""

    def __init__(self) -> None:
        self._rich: Any = None  # the `rich.progress.Progress` of all bars that are open
        self._tqdm: list[Any] = []

    def display(self, kind: str) -> Display:
        """A display for one more bar.

        Args:
            kind: `rich`, `tqdm` or `lines`; `auto` takes the first of them that is installed and fits the terminal.
        """
        if kind == "auto":
            kind = _fitting()
        return {"rich": RichDisplay, "tqdm": TqdmDisplay}[kind](self) if kind != "lines" else Lines()

    def aside(self) -> AbstractContextManager[Any]:
        """What is printed inside does not run into the bars."""
        # rich takes care of what is printed by itself
        return self._tqdm[-1].external_write_mode() if self._tqdm else nullcontext()

    # rich

    def add_rich_task(self, state: State) -> Any:
        """Start with the first bar; returns the bar's id."""
        if self._rich is None:
            self._rich = _rich_progress()
            self._rich.start()
        return self._rich.add_task("", **_fields(state))

    def update_rich_task(self, task: Any, state: State) -> None:
        """Draw."""
        self._rich.update(task, **_fields(state))
        self._rich.refresh()

    def end_rich_task(self, task: Any, state: State) -> None:
        """Only the last bar stays on the screen, with the terminal given back."""
        progress = self._rich
        if len(progress.task_ids) > 1:
            progress.remove_task(task)
            progress.refresh()
            return
        self._rich = None
        try:
            progress.update(task, **_fields(state))
        finally:
            progress.stop()

    # tqdm

    def open_tqdm(self, state: State) -> Any:
        """One more bar."""
        bar = _tqdm_bar(state)
        self._tqdm.append(bar)
        return bar

    def close_tqdm(self, bar: Any) -> None:
        """One bar fewer."""
        self._tqdm.remove(bar)
        bar.close()


class RichDisplay(Display):
    """A bar by rich. There is no thread: the loop draws."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._task: Any = None

    @override
    def open(self, state: State) -> None:
        self._task = self._screen.add_rich_task(state)
        self.draw(state)

    @override
    def draw(self, state: State) -> None:
        self._screen.update_rich_task(self._task, state)

    @override
    def close(self, state: State) -> None:
        self._screen.end_rich_task(self._task, state)


class TqdmDisplay(Display):
    """A bar by tqdm. There is no thread: the loop draws."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._bar: Any = None

    @override
    def open(self, state: State) -> None:
        self._bar = self._screen.open_tqdm(state)

    @override
    def draw(self, state: State) -> None:
        self._set(state)
        self._bar.refresh()

    @override
    def close(self, state: State) -> None:
        self._set(state)
        self._screen.close_tqdm(self._bar)

    def _set(self, state: State) -> None:
        self._bar.n = state.done
        self._bar.set_postfix_str(state.numbers(), refresh=False)


def validate_kind(kind: str) -> None:
    """Raise on every rank for a display that is not known or not installed."""
    if kind not in KINDS:
        raise ValueError(f"`fabric.progress(display={kind!r})` is not known. Choose one of {', '.join(KINDS)}.")
    if kind in ("rich", "tqdm"):
        require_extra(f"fabric.progress(display={kind!r})", extra=kind)


def _fitting() -> str:
    if sys.stderr is None or not sys.stderr.isatty():
        return "lines"
    if is_installed("rich"):
        from rich.console import Console

        return "lines" if Console(file=sys.stderr).is_dumb_terminal else "rich"
    return "tqdm" if is_installed("tqdm") else "lines"


def _fields(state: State) -> dict[str, Any]:
    head = f"{state.description} " if state.description else ""
    return {"completed": state.done, "total": state.total, "head": head, "tail": f"{state.amount()}  {state.numbers()}"}


def _rich_progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.fields[head]}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[tail]}", markup=False),
        console=Console(file=sys.stderr),
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),  # what goes into a file or a pipe still goes there
    )


def _tqdm_bar(state: State) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread

    head = "{percentage:3.0f}%|{bar}| " if state.total else ""
    return Bar(
        total=state.total,
        initial=state.done,
        desc=f"{state.description} " if state.description else None,
        file=sys.stderr,
        leave=None,  # the outermost one stays
        **_width(),
        bar_format="{desc}" + head + ("{n_fmt}/{total_fmt}" if state.total is not None else "{n_fmt}") + "{postfix}",
    )


def _width() -> dict[str, Any]:
    """tqdm takes a terminal that does not tell its size for one without any room."""
    try:
        told = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:
        told = False
    return {"dynamic_ncols": True} if told else {"ncols": 80, "nrows": 24}
