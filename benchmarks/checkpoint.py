# SPDX-License-Identifier: Apache-2.0
"""Saving and loading one file, beside `torch.save` with `os.fsync` and `torch.load`: time and memory peak.

And for how long a save holds the loop that another thread writes.
"""

import os
import re
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.libraries import quiet
from benchmarks.report import INSTALLED, NAMES, Row, in_turn, interval, main, median_ratio, seconds

WIDTH, LAYERS = 1024, 10  # with Adam's two moments a state of 126 MB
BOUND = 1.05
HELD_BOUND = 0.2  # of the blocking save, on the CPU


def measure(quick: bool) -> list[Row]:
    quiet()
    rows = []
    for what in ("save", "load"):
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as directory:
            names = [name for name in JOBS if name == "raw" or INSTALLED[name]]
            jobs = {name: Job(name, Path(directory)) for name in names}
            times = in_turn({name: partial(job.timed, what) for name, job in jobs.items()}, 2 if quick else 25)
        rows += [_row(what, name, times) for name in times if name != "raw"]
        rows += _peak_rows(what, {name: _peak(name, what) for name in names})
    return [*rows, _held_row(2 if quick else 15)]


def _row(what: str, name: str, times: dict[str, list[float]]) -> Row:
    ratio = median_ratio(times[name], times["raw"])
    low, high = interval(median_ratio, times[name], times["raw"])
    seen = f"x{ratio:.3f} (95%: {low:.3f} to {high:.3f}) of {statistics.median(times['raw']):.2f} s"
    bound = (f"x{BOUND}", ratio <= BOUND) if name == "fabric" else ("", None)
    return Row(f"{what} one file of 126 MB", NAMES[name], seen, *bound)


def _peak_rows(what: str, peaks: dict[str, float]) -> list[Row]:
    rows = []
    for name, peak in peaks.items():
        limit = peaks["raw"] + 8  # MB: pages that the allocator happens to keep
        bound = (f"{peaks['raw']:.0f} MB by hand", peak <= limit) if name == "fabric" else ("", None)
        if name != "raw":
            rows.append(Row(f"memory peak of {what} over the state's own", NAMES[name], f"{peak:.0f} MB", *bound))
    return rows


def _held_row(rounds: int) -> Row:
    """Seconds until `save(blocking=False)` returns, from the second time on, where nothing else is being written."""
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as directory:
        state = dict(zip(("model", "optimizer"), fabric.setup(*_build()), strict=True))
        handles: list[Any] = []

        def ask(blocking: bool) -> float:
            path = Path(directory) / f"{blocking}.ckpt"
            path.unlink(missing_ok=True)
            held = seconds(lambda: handles.append(fabric.save(path, state, blocking=blocking)))
            handles[-1].result()
            return held

        ask(blocking=False)  # the first one allocates the memory for the copies
        times = in_turn({"blocking": lambda: ask(blocking=True), "held": lambda: ask(blocking=False)}, rounds)
    ratio = median_ratio(times["held"], times["blocking"])
    low, high = interval(median_ratio, times["held"], times["blocking"])
    seen = f"x{ratio:.3f} (95%: {low:.3f} to {high:.3f}) of {statistics.median(times['blocking']):.2f} s"
    name = "`save(blocking=False)` holds the loop, of the blocking save"
    return Row(name, NAMES["fabric"], seen, f"x{HELD_BOUND}", ratio <= HELD_BOUND)


class Job:
    """A model and its optimizer, with one library's way to save and to load them.

    Args:
        name: Which library.
        directory: Where its file goes.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.path = directory / f"{name}.ckpt"
        self.save, self.load = JOBS[name](str(self.path), *_build())

    def timed(self, what: str) -> float:
        """Seconds of one save to a new file, or of one load of a file that the page cache holds."""
        if what == "load":
            if not self.path.exists():
                self.save()
            return seconds(self.load)
        self.path.unlink(missing_ok=True)
        return seconds(self.save)


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _raw(path: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    def save() -> None:
        with open(path, "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load() -> None:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return save, load


def _fabric(path: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    from fabric import Fabric

    return _facade(Fabric(accelerator="cpu", devices=1), path, model, optimizer)


def _lightning(path: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    from lightning.fabric import Fabric

    return _facade(Fabric(accelerator="cpu", devices=1), path, model, optimizer)


def _facade(fabric: Any, path: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    return partial(fabric.save, path, state), partial(fabric.load, path, state)


def _accelerate(path: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Accelerate saves what it has prepared to a folder of files, named after what they hold."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    folder = f"{path}-folder"

    def save() -> None:
        accelerator.save_state(folder)
        Path(path).touch()

    return save, partial(accelerator.load_state, folder)


JOBS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "raw": _raw,
    "fabric": _fabric,
    "lightning": _lightning,
    "accelerate": _accelerate,
}


def _peak(name: str, what: str) -> float:
    """MB that the process grows by at most during one save or load (Linux; else 0): the median of five processes."""
    peaks = []
    for _ in range(5):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peaks.append(pool.submit(_measure_peak, name, what).result())
    return statistics.median(peaks)


def _measure_peak(name: str, what: str) -> float:
    quiet()
    if not Path("/proc/self/clear_refs").exists():
        return 0.0
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as directory:
        job = Job(name, Path(directory))
        if what == "load":
            job.save()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = _status("VmRSS")
        job.save() if what == "save" else job.load()
        return _status("VmHWM") - before


def _status(key: str) -> float:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 1024


if __name__ == "__main__":
    main(measure)
