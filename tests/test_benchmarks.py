# SPDX-License-Identifier: Apache-2.0
"""The figures of the benchmarks that do not depend on the machine, and the arithmetic behind the others."""

import pytest

from benchmarks import report, steppability
from benchmarks.libraries import _fabric, _raw, tiny


@pytest.mark.parametrize("precision", steppability.BOUNDS)
def test_one_step_is_short_enough_to_walk_through(precision):
    calls, lines = steppability.count(_fabric(precision, tiny, ()))
    most_calls, most_lines = steppability.BOUNDS[precision]
    assert 0 < calls <= most_calls
    assert 0 < lines <= most_lines


def test_the_loop_by_hand_counts_nothing():
    assert steppability.count(_raw("32-true", tiny, ())) == (0, 0)


def test_in_turn_asks_each_action_once_a_round_after_the_warm_up():
    calls = {"a": 0, "b": 0}

    def ask(name):
        calls[name] += 1
        return float(calls[name])

    figures = report.in_turn({"a": lambda: ask("a"), "b": lambda: ask("b")}, rounds=3, warmup=2)
    assert figures == {"a": [3.0, 4.0, 5.0], "b": [3.0, 4.0, 5.0]}


def test_statistics_are_of_pairs():
    base = [1.0, 10.0, 100.0]
    values = [2.0, 20.0, 200.0]
    assert report.median_ratio(values, base) == 2.0
    assert report.median_difference(values, base) == 10.0
    assert report.interval(report.median_ratio, values, base) == (2.0, 2.0)
    low, high = report.interval(report.median_difference, values, base)
    assert low <= 10.0 <= high


def test_the_table_is_markdown():
    rows = [report.Row("a step", "Fabric", "+1 us", "+5 us", True), report.Row("import", "Fabric", "x2", "x1", False)]
    assert report.table(rows) == (
        "| what   | library | seen  | at most | met |\n"
        "|--------|---------|-------|---------|-----|\n"
        "| a step | Fabric  | +1 us | +5 us   | yes |\n"
        "| import | Fabric  | x2    | x1      | NO  |"
    )
