# SPDX-License-Identifier: Apache-2.0
"""CPU time that each library adds to one training step of a tiny model in one process, over the loop by hand."""

import functools
import statistics

import torch

from benchmarks.libraries import Subject, quiet, subjects
from benchmarks.report import NAMES, Row, cpu_seconds, in_turn, interval, main, median_difference

X, Y = torch.randn(8, 16), torch.randn(8, 1)


def train(subject: Subject, steps: int) -> None:
    model, optimizer, backward = subject.model, subject.optimizer, subject.backward
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        backward(loss)
        optimizer.step()


def measure(quick: bool) -> list[Row]:
    quiet()
    return [row for precision in ("32-true", "bf16-mixed") for row in _measure(precision, quick)]


def _measure(precision: str, quick: bool) -> list[Row]:
    steps = 50
    made = subjects(precision)
    actions = {name: functools.partial(_microseconds, subject, steps) for name, subject in made.items()}
    times = in_turn(actions, 5 if quick else 150, warmup=10)
    raw = statistics.median(times["raw"])
    added = {name: median_difference(values, times["raw"]) for name, values in times.items() if name != "raw"}
    rows = []
    for name, extra in added.items():
        low, high = interval(median_difference, times[name], times["raw"])
        seen = f"{extra:+.1f} us ({low:+.1f} to {high:+.1f}) = {extra / raw:+.1%} of {raw:.0f} us"
        bound = _bound(extra, raw, added) if (name, precision) == ("fabric", "32-true") else ("", None)
        rows.append(Row(f"one step of a tiny model, {precision}", NAMES[name], seen, *bound))
    return rows


def _microseconds(subject: Subject, steps: int) -> float:
    return cpu_seconds(lambda: train(subject, steps)) / steps * 1e6


def _bound(extra: float, raw: float, added: dict[str, float]) -> tuple[str, bool]:
    if "lightning" not in added:
        return "+5%", extra < 0.05 * raw
    limit = added["lightning"] / 5
    return f"+5% and +{limit:.1f} us (a fifth of Lightning Fabric)", extra < 0.05 * raw and extra <= limit


if __name__ == "__main__":
    main(measure)
