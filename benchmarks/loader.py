# SPDX-License-Identifier: Apache-2.0
"""CPU time that each library adds to one batch of a `DataLoader` without workers, over iterating it directly."""

import functools
import statistics

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.libraries import Subject, quiet, subjects
from benchmarks.report import NAMES, Row, cpu_seconds, in_turn, interval, main, median_difference

BATCHES = 200
BOUND = 5.0  # microseconds


def measure(quick: bool) -> list[Row]:
    quiet()
    data = TensorDataset(torch.randn(BATCHES * 8, 16), torch.randn(BATCHES * 8, 1))
    made = subjects("32-true", loader=DataLoader(data, batch_size=8))
    actions = {name: functools.partial(_microseconds, subject) for name, subject in made.items()}
    times = in_turn(actions, 3 if quick else 100, warmup=3)
    raw = statistics.median(times["raw"])
    rows = []
    for name, values in times.items():
        if name == "raw":
            continue
        extra = median_difference(values, times["raw"])
        low, high = interval(median_difference, values, times["raw"])
        seen = f"{extra:+.1f} us ({low:+.1f} to {high:+.1f}) = {extra / raw:+.1%} of {raw:.0f} us"
        bound = (f"+{BOUND:.0f} us", extra <= BOUND) if name == "fabric" else ("", None)
        rows.append(Row("one batch of 8 from a loader", NAMES[name], seen, *bound))
    return rows


def _microseconds(subject: Subject) -> float:
    def epoch() -> None:
        for _ in subject.loader:
            pass

    return cpu_seconds(epoch) / BATCHES * 1e6


if __name__ == "__main__":
    main(measure)
