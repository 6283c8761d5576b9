# SPDX-License-Identifier: Apache-2.0
"""What a `CheckpointManager` refuses, and what it says then."""

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric import Fabric
from fabric.checkpoint import CheckpointManager


def texts(error: str) -> str:
    return f"^{re.escape(error)}$"


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"directory": ""},
        TypeError,
        "`CheckpointManager('', ...)` takes a folder first. Write `CheckpointManager('runs/a', fabric=fabric)`.",
    ),
    (
        {"keep_last": 0},
        ValueError,
        "`CheckpointManager(keep_last=0)` takes the number of checkpoints that stay, 1 or more, or None for all.",
    ),
    (
        {"keep_best": "loss"},
        ValueError,
        "`CheckpointManager(keep_best='loss')` takes the name of a metric and whether its smallest or largest value is"
        " the best: `('val_loss', 'min')`, or `('val_loss', 'min', 3)` for the three best.",
    ),
    (
        {"keep_best": ("loss", "mni")},
        ValueError,
        "`CheckpointManager(keep_best=('loss', 'mni'))` takes the name of a metric and whether its smallest or largest"
        " value is the best: `('val_loss', 'min')`, or `('val_loss', 'min', 3)` for the three best.",
    ),
    (
        {"keep_best": ("loss", "min", 0)},
        ValueError,
        "`CheckpointManager(keep_best=('loss', 'min', 0))` takes the name of a metric and whether its smallest or"
        " largest value is the best: `('val_loss', 'min')`, or `('val_loss', 'min', 3)` for the three best.",
    ),
    (
        {"every": 0},
        ValueError,
        "`CheckpointManager(every=0)` takes a number of steps, 1 or more, or a `datetime.timedelta`.",
    ),
    (
        {"every": 600.0},
        ValueError,
        "`CheckpointManager(every=600.0)` takes a number of steps, 1 or more, or a `datetime.timedelta`. For seconds"
        " write `timedelta(seconds=600.0)`.",
    ),
    (
        {"every": timedelta()},
        ValueError,
        "`CheckpointManager(every=datetime.timedelta(0))` takes a number of steps, 1 or more, or a"
        " `datetime.timedelta`.",
    ),
    (
        {"signals": (9,)},
        ValueError,
        "`CheckpointManager(signals=(9,))` takes signals that announce the end of the job, such as"
        " `(signal.SIGTERM, signal.SIGUSR1)`; not SIGINT, which is Ctrl-C, and none that can't be handled.",
    ),
    (
        {"signals": 15},
        ValueError,
        "`CheckpointManager(signals=15)` takes signals that announce the end of the job, such as"
        " `(signal.SIGTERM, signal.SIGUSR1)`; not SIGINT, which is Ctrl-C, and none that can't be handled.",
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "error"), WRONG)
def test_wrong_arguments(fabric: Fabric, arguments: dict[str, Any], kind: type[Exception], error: str) -> None:
    with pytest.raises(kind, match=texts(error)):
        CheckpointManager(**{"directory": "run", "fabric": fabric, **arguments})


METRICS: list[tuple[Any, Any, type[Exception], str]] = [
    (
        -1,
        None,
        ValueError,
        "`CheckpointManager.save(step=-1, ...)` takes the number of the step, an integer, 0 or more.",
    ),
    (
        1.0,
        None,
        ValueError,
        "`CheckpointManager.save(step=1.0, ...)` takes the number of the step, an integer, 0 or more.",
    ),
    (
        1,
        0.5,
        TypeError,
        "`CheckpointManager.save(step, state, metrics)` takes a dictionary of names and numbers, but got `float`."
        " Write `{'val_loss': loss}`.",
    ),
    (
        1,
        {"acc": 1, "f1": 0},
        ValueError,
        "`CheckpointManager.save(step, state, metrics)`: `metrics` holds `acc`, `f1`, and `keep_best` needs `loss`."
        " Add it, or leave `metrics` out for a checkpoint that is none of the best.",
    ),
    (
        1,
        {},
        ValueError,
        "`CheckpointManager.save(step, state, metrics)`: `metrics` holds nothing, and `keep_best` needs `loss`."
        " Add it, or leave `metrics` out for a checkpoint that is none of the best.",
    ),
    (
        1,
        {"loss": "0.5"},
        TypeError,
        "`CheckpointManager.save(step, state, metrics)`: `metrics['loss']` is a `str`. Pass a number, or a tensor with"
        " one element.",
    ),
    (
        1,
        {"loss": torch.zeros(3)},
        TypeError,
        "`CheckpointManager.save(step, state, metrics)`: `metrics['loss']` is a `Tensor` of shape (3,). Pass a number,"
        " or a tensor with one element.",
    ),
    (
        1,
        {"loss": 1.0, 3: 2.0},
        TypeError,
        "`CheckpointManager.save(step, state, metrics)`: the name 3 is no text.",
    ),
]


@pytest.mark.parametrize(("step", "metrics", "kind", "error"), METRICS)
def test_wrong_steps_and_metrics(
    fabric: Fabric, tmp_path: Path, step: Any, metrics: Any, kind: type[Exception], error: str
) -> None:
    checkpoints = CheckpointManager(tmp_path, fabric=fabric, keep_best=("loss", "min"))
    with checkpoints, pytest.raises(kind, match=texts(error)):
        checkpoints.save(step, {}, metrics)
    assert os.listdir(tmp_path) == []


def test_wrong_choices(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric) as checkpoints:
        needs = (
            "`CheckpointManager` knows no best checkpoint without `keep_best`."
            " Write `CheckpointManager(..., keep_best=('val_loss', 'min'))`."
        )
        with pytest.raises(ValueError, match=texts(needs)):
            checkpoints.best()
        with pytest.raises(ValueError, match=texts(needs)):
            checkpoints.restore({}, "best")
        for which in ("last", True, 1.5):
            error = (
                f"`CheckpointManager.restore(state, {which!r})` knows no such checkpoint. Choose 'latest', 'best', or"
                " the number of a step."
            )
            with pytest.raises(ValueError, match=texts(error)):
                checkpoints.restore({}, which)  # type: ignore[arg-type]
        for step in (1, 3):
            checkpoints.save(step, {})
        error = (
            f"`CheckpointManager.restore(state, 2)`: `{tmp_path}` has no checkpoint of that step. Choose one of 1, 3."
        )
        with pytest.raises(ValueError, match=texts(error)):
            checkpoints.restore({}, 2)
