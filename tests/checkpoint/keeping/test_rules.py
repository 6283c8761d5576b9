# SPDX-License-Identifier: Apache-2.0
"""Names, notes, and which checkpoints stay."""

import math
from datetime import timedelta

import pytest

from fabric.checkpoint.keeping.rules import (
    Best,
    Kept,
    name_of,
    note_of,
    note_with,
    noted_step,
    read_note,
    step_of,
    superseded,
)
from fabric.checkpoint.keeping.schedule import Schedule


def kept(**losses: float | None) -> list[Kept]:
    """`kept(s1=0.5, s2=None)`: step 1 with a loss, step 2 without."""
    steps = {int(name[1:]): loss for name, loss in losses.items()}
    return [Kept(step, "", {} if loss is None else {"loss": loss}) for step, loss in steps.items()]


CHECKPOINTS = kept(s1=0.5, s2=0.1, s3=math.nan, s4=0.1, s5=None, s6=0.9)


@pytest.mark.parametrize(
    ("last", "best", "newest", "gone"),
    [
        (None, None, 6, []),
        (None, Best("loss", "min"), 6, []),
        (3, None, 6, [1, 2, 3]),
        (10, None, 6, []),
        (1, Best("loss", "min"), 6, [1, 3, 4, 5]),
        (1, Best("loss", "max"), 6, [1, 2, 3, 4, 5]),
        (1, Best("loss", "min", 2), 6, [1, 3, 5]),
        (2, Best("loss", "min", 9), 6, [3]),
        (1, Best("other", "min"), 6, [1, 2, 3, 4, 5]),
        (1, None, 2, [1, 3, 4, 5]),
    ],
)
def test_which_need_not_stay(last: int | None, best: Best | None, newest: int, gone: list[int]) -> None:
    assert [each.step for each in superseded(CHECKPOINTS, last=last, best=best, newest=newest)] == gone


@pytest.mark.parametrize(
    ("mode", "order"),
    [("min", [3, 2, 1, 6, 4]), ("max", [4, 1, 6, 2, 3])],
)
def test_the_best_comes_first_and_nan_is_none(mode: str, order: list[int]) -> None:
    found = kept(s1=0.5, s2=-0.1, s3=-math.inf, s4=math.inf, s5=math.nan, s6=0.5, s7=None)
    assert [each.step for each in Best("loss", mode).ordered(found)] == order  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, 7, 12345678, 123456789012])
def test_names_tell_the_step(step: int) -> None:
    assert step_of(name_of(step)) == step
    assert noted_step(note_of(name_of(step))) == step


@pytest.mark.parametrize(
    "name",
    ["step-7.ckpt", "step-000000007.ckpt", ".step-00000007.ckpt.ab12.tmp", "step-00000007.ckpt.ab12.tmp", "best.ckpt"],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert step_of(name) is None
    assert noted_step(name.replace(".ckpt", ".json")) is None
    assert noted_step(name_of(7)) is None
    assert step_of(note_of(name_of(7))) is None


def test_notes_keep_every_number_to_the_bit() -> None:
    metrics = {"val/loss": 0.1 + 0.2, "tiny": 5e-324, "inf": -math.inf, "nan": math.nan, "n": 3.0}
    assert str(read_note(note_with(7, metrics), 7)) == str(metrics)
    assert b"NaN" not in note_with(7, metrics)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff\x00", b"[]", b"3", b"{}", b'{"step": 7}', b'{"step": 7, "metrics": 3}'),
        *(b'{"step": 7, "metrics": {"a": "x"}}', b'{"step": 7, "metrics": {"a": null}}', note_with(8, {})),
    ],
)
def test_a_damaged_note_says_nothing(content: bytes) -> None:
    assert read_note(content, 7) is None


@pytest.mark.parametrize(
    ("every", "steps", "due"),
    [
        (1, [1, 2, 3, 3], [1, 2, 3]),
        (3, [1, 2, 3, 4, 5, 6, 6], [3, 6]),
        (1000, [391, 782, 1173, 1564, 1955, 2346], [1173, 2346]),
        (10, [1001, 1009, 1010, 1011], [1010]),
        (5, [0, 1], [0]),
    ],
)
def test_due_by_steps(every: int, steps: list[int], due: list[int]) -> None:
    schedule = Schedule(every)
    assert [step for step in steps if schedule.reaches(step)] == due
    assert not schedule.time_is_up()


def test_after_a_restart_the_steps_go_on() -> None:
    schedule = Schedule(10)
    schedule.saved(17)
    assert [step for step in range(18, 41) if schedule.reaches(step)] == [20, 30, 40]


def test_due_by_time() -> None:
    assert not Schedule(timedelta(days=1)).time_is_up()
    at_once = Schedule(timedelta(microseconds=1))
    while not at_once.time_is_up():
        pass
    assert not at_once.reaches(1)
