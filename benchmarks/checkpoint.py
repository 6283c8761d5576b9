# SPDX-License-Identifier: Apache-2.0
"""Saving and loading one file, beside `torch.save` and `save_file` with `os.fsync`: time, and the memory peak.

And for how long a save holds the loop that another thread writes. Folders are in `checkpoint_folder`.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import checkpoint_folder
from benchmarks.checkpoint_rows import held_rows_of, peak_rows, time_rows
from benchmarks.checkpoint_ways import CLEAR_REFS, FILES, KEEPS_NOTHING, SIZES, Size, directory, peak, prepared
from benchmarks.libraries import quiet
from benchmarks.report import INSTALLED, Row, in_turn, main, seconds

ROOT = Path(__file__).resolve().parents[1]


def measure(quick: bool) -> list[Row]:
    quiet()
    rows = []
    for name in ("small",) if quick else ("small", "large"):
        for suffix in FILES:
            rows += file_rows(name, suffix, _rounds(name, quick, 21))
        rows += held_rows(name, _rounds(name, quick, 15))
        rows += checkpoint_folder.measure(name, _rounds(name, quick, 15))
    return rows


def _rounds(name: str, quick: bool, rounds: int) -> int:
    if quick:
        return 2
    return rounds if name == "small" else 3


def file_rows(name: str, suffix: str, rounds: int) -> list[Row]:
    """Times and memory peaks of saving and loading one file."""
    size = SIZES[name]
    text = size.text if suffix == "ckpt" else size.weights
    libraries = [library for library in FILES[suffix] if library == "raw" or INSTALLED[library]]
    rows = []
    for what, times in _times(size, suffix, libraries, rounds).items():
        rows += time_rows(f"{what} .{suffix} file, {text}", times)
    if CLEAR_REFS.exists():
        peaks = {library: _peaks(name, suffix, library) for library in libraries}
        for what in ("save", "load"):
            of_what = {library: found[what] for library, found in peaks.items()}
            rows += peak_rows(f"memory peak of {what}: .{suffix} file, {text}", of_what, size)
    return rows


def held_rows(name: str, rounds: int) -> list[Row]:
    """Seconds until a save in the background returns, from the second time on, where nothing else is being written."""
    with directory() as place:
        times = _held(SIZES[name], place, rounds)
    return held_rows_of(f"background save of a file holds the loop, {SIZES[name].text}", times)


def _held(size: Size, place: Path, rounds: int) -> dict[str, list[float]]:
    import torch.distributed.checkpoint as dcp

    from fabric import Fabric

    model, optimizer = size.build()
    own = Fabric(accelerator="cpu", devices=1)
    state = prepared(own, model, optimizer)
    plain = {key: value.state_dict() for key, value in {"model": model, "optimizer": optimizer}.items() if value}
    handles: list[Any] = []

    def ask(blocking: bool) -> float:
        path = place / f"{blocking}.ckpt"
        path.unlink(missing_ok=True)
        os.sync()
        held = seconds(lambda: handles.append(own.save(path, state, blocking=blocking)))
        handles.pop().result()
        return held

    def by_hand() -> float:
        path = place / "by_hand"
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        held = seconds(lambda: handles.append(dcp.async_save(plain, checkpoint_id=path, no_dist=True)))
        handles.pop().result()
        return held

    actions = {"blocking": partial(ask, True), "held": partial(ask, False), "held by hand": by_hand}
    return in_turn(actions, rounds)  # warming up allocates the memory for the copies


def _times(size: Size, suffix: str, libraries: Sequence[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a save to a new file, and of a load of a file that the page cache holds."""
    built = None if size.has_optimizer else size.build()  # one model for all: each would take 2 GB
    with directory() as place:
        jobs = {library: Job(suffix, library, place, *(built or size.build())) for library in libraries}
        return {
            what: in_turn({library: partial(job.timed, what) for library, job in jobs.items()}, rounds)
            for what in ("save", "load")
        }


class Job:
    """A model and its optimizer, with one library's way to save and to load them.

    Args:
        suffix: Of the file.
        library: Which library.
        place: The folder of its file.
        model: The model.
        optimizer: Its optimizer, if there is one; weights that stand alone are saved without it.
    """

    def __init__(self, suffix: str, library: str, place: Path, model: Any, optimizer: Any) -> None:
        self.path = place / f"{library}.{suffix}"
        self.save, self.load = FILES[suffix][library](
            str(self.path), model, None if suffix == "safetensors" else optimizer
        )

    def timed(self, what: str) -> float:
        """Seconds of one save or load."""
        if what == "load":
            return seconds(self.load)
        self.path.unlink(missing_ok=True)
        os.sync()  # what others left to be written is not in the way
        return seconds(self.save)


def _peaks(name: str, suffix: str, library: str) -> dict[str, float]:
    """MB of a save and of a load, in a process of their own."""
    words = [sys.executable, "-m", "benchmarks.checkpoint", "peaks", name, suffix, library]
    environ = {**os.environ, **KEEPS_NOTHING}
    done = subprocess.run(words, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def job(name: str, suffix: str, library: str) -> None:
    """What that process does."""
    quiet()
    for size in (SIZES["tiny"], SIZES[name]):  # the first one loads what is loaded at first use
        with directory() as place:
            one = Job(suffix, library, place, *size.build())
            found = {"save": peak(one.save), "load": peak(one.load)}
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["peaks"]:
        job(*sys.argv[2:])
    else:
        main(measure)
