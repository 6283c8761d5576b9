# SPDX-License-Identifier: Apache-2.0
"""`fabric.profile`: PyTorch's profiler on every rank, one Chrome trace each, and one table of all ranks."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from fabric.plugins.io.whole_file import replacing_file
from fabric.strategies import Strategy
from fabric.utilities.cloud_io import local_path
from fabric.utilities.types import PathLike
from fabric.watching.communication import Communication, communication_of, communication_table
from fabric.watching.displays import Screen


class Profile:
    """Records what happens inside, by `torch.profiler`. Made by `fabric.profile`.

    On leaving, also by `break` or an exception, what was recorded is on the disk. Without an exception leaving is
    collective, and rank 0 prints the table.

    Args:
        directory: Where the traces go.
        strategy: Knows the rank and the device, and gathers what the ranks recorded.
        screen: Where rank 0 prints the table.
        schedule: Waiting, warming-up and recorded steps, cycles (0: until the end) and steps to skip first; None
            records everything.
        rows: Operators in the table.
        compress: Write `.json.gz`.
        **options: Further arguments of `torch.profiler.profile`.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        strategy: Strategy,
        screen: Screen,
        schedule: dict[str, int] | None,
        rows: int,
        compress: bool,
        **options: Any,
    ) -> None:
        self._directory = os.fspath(directory)
        self._strategy = strategy
        self._screen = screen
        self._schedule = schedule
        self._rows = rows
        self._suffix = ".json.gz" if compress else ".json"
        self._options = {"activities": activities_of(strategy.root_device), **options}
        self._cycles = self._steps = 0
        self._operators = ""
        self._communication = Communication()
        self._error: str | None = None
        self._profiler: Any = None

    @property
    def profiler(self) -> Any:
        """The `torch.profiler.profile` behind it, from entering on."""
        return self._profiler

    def __enter__(self) -> "Profile":
        schedule = None if self._schedule is None else torch.profiler.schedule(**self._schedule)
        self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._keep, **self._options)
        self._profiler.__enter__()
        return self

    def step(self) -> None:
        """A step is over; call it at the end of each one, on every rank."""
        self._steps += 1
        if self._steps != self._second_cycle:
            self._profiler.step()
            return
        with warnings.catch_warnings():  # the traces and the table are of one cycle each: that is what we want
            warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle")
            self._profiler.step()

    @property
    def _second_cycle(self) -> int | None:
        """The step with which PyTorch prepares the second cycle."""
        if self._schedule is None:
            return None
        cycle = self._schedule["wait"] + self._schedule["warmup"] + self._schedule["active"]
        return self._schedule["skip_first"] + cycle + self._schedule["wait"]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.__exit__(kind, error, trace)
        if kind is None:
            self._report()

    # keeping what was recorded

    def _keep(self, profiler: Any) -> None:
        """A cycle is over: write its trace, and remember what the table needs. An error waits for all ranks."""
        cycle, self._cycles = self._cycles, self._cycles + 1
        name = f"rank{self._strategy.global_rank}{f'-cycle{cycle}' if cycle else ''}{self._suffix}"
        try:
            self._write(profiler, name)
        except OSError as error:
            self._error = f"{type(error).__name__}: {error}"
        self._communication = communication_of(profiler.events())
        key = "self_cpu_time_total" if self._strategy.root_device.type == "cpu" else "self_device_time_total"
        self._operators = profiler.key_averages().table(sort_by=key, row_limit=self._rows)

    def _write(self, profiler: Any, name: str) -> None:
        """By way of a file beside it, and only where the folder is remote, of one in the system's temporary folder."""
        folder = local_path(self._directory)
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".trace-", dir=folder) as temporary:
            path = os.path.join(temporary, name)
            profiler.export_chrome_trace(path)
            if folder is not None:
                os.replace(path, os.path.join(folder, name))
                return
            with open(path, "rb") as source, replacing_file(f"{self._directory.rstrip('/')}/{name}", {}) as target:
                shutil.copyfileobj(source, target)

    # telling

    def _report(self) -> None:
        reports = self._strategy.gather_objects((self._error, self._cycles, self._communication))
        for rank, (error, _, _) in enumerate(reports):
            if error is not None:
                raise RuntimeError(f"`fabric.profile({self._directory!r})`: rank {rank} could not write: {error}")
        if not all(cycles for _, cycles, _ in reports):
            self._show(self._nothing())
            return
        files = f"`{self._directory}/rank*{self._suffix}`"
        self._show(f"{self._operators}\n{self._lost([report for _, _, report in reports])}\nTraces: {files}")

    def _show(self, text: str) -> None:
        if self._strategy.global_rank == 0:
            with self._screen.aside():
                print(text)  # noqa: T201

    def _lost(self, ranks: Sequence[Communication]) -> str:
        if not any(rank.busy for rank in ranks):
            return "No time went into communication."
        return f"Time in communication, and that in which nothing else was done:\n{communication_table(ranks)}"

    def _nothing(self) -> str:
        assert self._schedule is not None  # without one everything is recorded
        before = sum(self._schedule[name] for name in ("skip_first", "wait", "warmup"))
        return (
            f"`fabric.profile({self._directory!r})` recorded nothing: `step()` was called {self._steps} times, and"
            f" recording starts after {before} steps (`skip_first` + `wait` + `warmup`)."
        )


def activities_of(device: torch.device) -> list[Any]:
    """What can be recorded where the device is: its own kernels as well, if it is not the CPU."""
    from torch.profiler import ProfilerActivity

    kinds = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    return [ProfilerActivity.CPU, *([kinds[device.type]] if device.type in kinds else [])]


def validated_schedule(
    *, wait: int, warmup: int | None, active: int | None, repeat: int, skip_first: int
) -> dict[str, int] | None:
    """The arguments of `torch.profiler.schedule`; None to record everything.

    Raises:
        ValueError: On every rank, for numbers that record nothing, or that have no meaning together.
    """
    given = {"skip_first": skip_first, "wait": wait, "warmup": warmup or 0, "active": active or 0, "repeat": repeat}
    for name, number in given.items():
        if number < 0 or (name == "active" and active == 0):
            least = 1 if name == "active" else 0
            raise ValueError(f"`fabric.profile({name}={number})` is too small. Write {least} or more.")
    if active is not None:
        return {**given, "warmup": 1 if warmup is None else warmup}
    for name, number in given.items():
        if number != (1 if name == "repeat" else 0):
            raise ValueError(
                f"`fabric.profile({name}={number})` has no meaning without `active`, the number of steps to record."
                " Give it too, and call `step()` at the end of each step."
            )
    return None
