# SPDX-License-Identifier: Apache-2.0
"""Rows, statistics and tables that all benchmarks share."""

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("fabric", "lightning", "accelerate")}
NAMES = {"fabric": "Fabric", "lightning": "Lightning Fabric", "accelerate": "Accelerate", "raw": "PyTorch by hand"}


@dataclass(frozen=True)
class Row:
    """One measured figure.

    Attributes:
        what: What was measured.
        who: Which library.
        seen: The figure, for people.
        bound: What design asks for, or an empty string where it asks for nothing.
        met: Whether the bound is met, or None where there is none.
    """

    what: str
    who: str
    seen: str
    bound: str = ""
    met: bool | None = None


def seconds(action: Callable[[], object]) -> float:
    """Time on the clock."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def cpu_seconds(action: Callable[[], object]) -> float:
    """Time that this process computed: for work in one thread it leaves out what other programs take."""
    start = time.process_time()
    action()
    return time.process_time() - start


def in_turn(actions: dict[str, Callable[[], float]], rounds: int, *, warmup: int = 1) -> dict[str, list[float]]:
    """Ask each action for a figure once a round, in an order that changes from round to round."""
    figures: dict[str, list[float]] = {name: [] for name in actions}
    order = list(actions)
    shuffle = random.Random(0).shuffle
    for index in range(warmup + rounds):
        shuffle(order)
        for name in order:
            figure = actions[name]()
            if index >= warmup:
                figures[name].append(figure)
    return figures


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios within each round."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def median_difference(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the differences within each round."""
    return statistics.median(value - other for value, other in zip(values, base, strict=True))


def interval(
    statistic: Callable[[Sequence[float], Sequence[float]], float],
    values: Sequence[float],
    base: Sequence[float],
    resamples: int = 2000,
) -> tuple[float, float]:
    """The 95% bootstrap interval of a statistic of paired samples."""
    draw = random.Random(0)
    pairs = list(zip(values, base, strict=True))
    found = []
    for _ in range(resamples):
        sample = draw.choices(pairs, k=len(pairs))
        found.append(statistic([value for value, _ in sample], [other for _, other in sample]))
    found.sort()
    return found[int(0.025 * resamples)], found[int(0.975 * resamples)]


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table that also reads well on a terminal."""
    header = ("what", "library", "seen", "at most", "met")
    cells = [header]
    for row in rows:
        met = {True: "yes", False: "NO", None: ""}[row.met]
        cells.append((row.what, row.who, row.seen, row.bound, met))
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def main(measure: Callable[[bool], list[Row]]) -> None:
    """The command line of one benchmark: `python -m benchmarks.step [--quick] [--json]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not how fast")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    rows = measure(options.quick)
    print("\n".join(json.dumps(asdict(row)) for row in rows) if options.json else table(rows))
