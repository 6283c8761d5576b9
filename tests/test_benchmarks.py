# SPDX-License-Identifier: Apache-2.0
"""The figures of the benchmarks that do not depend on the machine, and the arithmetic behind the others."""

from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint, checkpoint_rows, checkpoint_ways, memory, report, steppability
from benchmarks.ddp import measured_by_job
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


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's memory peak")
def test_a_model_that_starts_on_the_meta_device_never_takes_more_than_a_shard_and_a_block():
    peaks = measured_by_job("benchmarks.memory", 1, "8", ranks=2, MALLOC_MMAP_THRESHOLD_="65536")
    rows = {way: memory._row(way, peaks[way], ranks=2, blocks=8) for way in memory.NAMES}
    assert [way for way, row in rows.items() if row.met is False] == []
    assert max(peaks["constructor"]) < 0.7 * 8 * memory.MIB_OF_BLOCK < min(peaks["real"])


@pytest.mark.parametrize(("suffix", "library"), [("ckpt", "raw"), ("ckpt", "fabric"), ("safetensors", "fabric")])
def test_a_measured_save_and_load_of_a_checkpoint_bring_the_values_back(tmp_path, suffix, library):
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    model, optimizer = checkpoint_ways.TINY.build()
    job = checkpoint.Job(suffix, library, tmp_path, model, optimizer)
    job.save()
    saved = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    job.load()
    assert torch.equal(model[0].weight, saved)


def test_bounds_of_checkpoints_are_against_the_same_by_hand():
    times = {"raw": [1.0, 2.0], "fabric": [1.1, 2.2], "lightning": [3.0, 6.0]}
    assert [row.met for row in checkpoint_rows.time_rows("save", times)] == [False, None]
    peaks = {"raw": 100.0, "fabric": 101.0, "lightning": 200.0}
    assert [row.met for row in checkpoint_rows.peak_rows("save", peaks, checkpoint_ways.TINY)] == [True, None]
    held = {"blocking": [1.0, 2.0], "held": [0.1, 0.2], "held by hand": [0.5, 1.0]}
    assert [row.met for row in checkpoint_rows.held_rows_of("save", held)] == [True, None]
