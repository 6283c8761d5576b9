# SPDX-License-Identifier: Apache-2.0
"""Rows of the benchmarks of checkpoints: what was measured against the same by hand, and the bounds."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.checkpoint_ways import Size
from benchmarks.report import NAMES, Row, interval, median_ratio

BOUND = 1.05
HELD_BOUND = 0.2  # of the blocking save, on the CPU


def time_rows(what: str, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Each library's time against that by hand."""
    rows = []
    for library in times:
        if library != "raw":
            ratio = median_ratio(times[library], times["raw"])
            bound = (f"x{BOUND}", ratio <= BOUND) if library == "fabric" else ("", None)
            rows.append(Row(what, NAMES[library], seen(times[library], times["raw"]), *bound))
    return rows


def seen(values: Sequence[float], base: Sequence[float]) -> str:
    """A ratio, with its interval."""
    low, high = interval(median_ratio, values, base)
    median = statistics.median(base)
    return f"x{median_ratio(values, base):.3f} (95%: {low:.3f} to {high:.3f}) of {median:.3f} s"


def peak_rows(what: str, peaks: Mapping[str, float], size: Size) -> list[Row]:
    """Each library's memory peak above what the process held before; Fabric's may be that by hand."""
    rows = []
    for library, own in peaks.items():
        met = own <= peaks["raw"] + size.blank
        bound = (f"{peaks['raw']:.0f} MB by hand", met) if library == "fabric" else ("", None)
        if library != "raw":
            rows.append(Row(what, NAMES[library], f"{own:.0f} MB", *bound))
    return rows


def held_rows_of(what: str, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Held times against the blocking save, Fabric's and that of `dcp.async_save`."""
    blocking = times["blocking"]
    ratio = median_ratio(times["held"], blocking)
    by_hand = Row(what, "`dcp.async_save` by hand", seen(times["held by hand"], blocking))
    return [Row(what, NAMES["fabric"], seen(times["held"], blocking), f"x{HELD_BOUND}", ratio <= HELD_BOUND), by_hand]
