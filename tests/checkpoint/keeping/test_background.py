# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run that threads write: others stay until the new one is complete, and so does the job.

Where a test needs a save to be under way, its file system waits to be let through; notes are written at once.
"""

import errno
import os
import re
import signal
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from fabric import Fabric
from fabric.checkpoint import CheckpointManager
from tests.checkpoint.keeping.training import Trained, train
from tests.ranks import RankContext, run_ranks

GATE, FULL = threading.Event(), threading.Event()


class Held(LocalFileSystem):
    """Local files; no checkpoint is written until the gate is open, and none where the disk is full."""

    protocol = "held"

    @classmethod
    @override
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(os.fspath(path).removeprefix("held://"))

    @override
    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode and ".ckpt" in path:
            GATE.wait()
            if FULL.is_set():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._open(path, mode, **options)


fsspec.register_implementation("held", Held, clobber=True)


def manager(path: Path, fabric: Fabric, **options: Any) -> CheckpointManager:
    GATE.set()
    FULL.clear()
    return CheckpointManager(f"held://{path}", fabric=fabric, **{"blocking": False, "signals": (), **options})


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}.{end}" for step in steps for end in ("ckpt", "json")]


def test_others_stay_until_the_new_one_is_complete(fabric: Fabric, tmp_path: Path) -> None:
    with manager(tmp_path, fabric, keep_last=1, keep_best=("loss", "min")) as checkpoints:
        state = {"step": 1}
        checkpoints.save(1, state, {"loss": 2})
        assert checkpoints.restore({}) == {"step": 1}  # waits
        GATE.clear()
        checkpoints.save(2, {"step": 2}, {"loss": 1})
        first = f"held://{tmp_path}/{names(1)[0]}"
        assert (checkpoints.latest(), checkpoints.best()) == (first, first)
        assert [kept.step for kept in checkpoints.kept()] == [1]
        assert sorted(os.listdir(tmp_path)) == [*names(1), names(2)[1]]
        GATE.set()
        checkpoints.restore(state)
        assert state["step"] == 2
        assert sorted(os.listdir(tmp_path)) == names(2)
        checkpoints.save(3, {"step": 3}, {"loss": 0})
    assert sorted(os.listdir(tmp_path)) == names(3)


@pytest.mark.parametrize("call", ["save", "restore", "close", "latest"])
def test_an_error_is_raised_by_a_later_call(call: str, fabric: Fabric, tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, fabric, every=10)
    checkpoints.save(10, {"step": 10})
    checkpoints.restore({})
    FULL.set()
    checkpoints.save(20, {"step": 20})
    written = checkpoints._written
    assert written is not None
    written.handle.wait()
    calls: dict[str, Any] = {
        "save": lambda: checkpoints.save(30, {"step": 30}),
        "restore": lambda: checkpoints.restore({}),
        "close": checkpoints.close,
        "latest": checkpoints.latest,
    }
    text = re.escape(f"[Errno 28] No space left on device: '{written.handle.path}'")
    with pytest.raises(OSError, match=f"^{text}$"):
        calls[call]()
    assert sorted(os.listdir(tmp_path)) == names(10)
    FULL.clear()
    if call != "close":
        assert checkpoints.save(21, {"step": 21}) is not None  # it is still due
        checkpoints.close()
        assert sorted(os.listdir(tmp_path)) == names(10, 21)


def _hear(context: RankContext, directory: Path) -> list[Any]:
    fabric = context.fabric(strategy="ddp")
    heard: list[Any] = []
    with manager(directory, fabric, every=100, signals=(signal.SIGTERM,)) as checkpoints:
        FULL.set() if context.rank == 0 else None
        checkpoints.save(1, {"step": 1}, force=True)
        written = checkpoints._written
        assert written is not None
        written.handle.wait()
        FULL.clear()
        fabric.barrier()
        for step in (2, 3):  # the vote may travel during a step
            try:
                heard.append(checkpoints.save(step, {"step": step}) is not None)
            except OSError as error:
                heard.append(error.errno)
    return heard


@pytest.mark.ranks
def test_the_ranks_hear_of_an_error_where_nothing_is_due(tmp_path: Path) -> None:
    ranks = run_ranks(2, _hear, tmp_path)
    assert ranks[0] == ranks[1]
    assert ranks[0] in ([errno.ENOSPC, True], [False, errno.ENOSPC])


def _end(context: RankContext, directory: Path, full: bool) -> list[Any]:
    """The signal comes while a checkpoint is being written, or after it could not be."""
    fabric = context.fabric(strategy="ddp")
    checkpoints = manager(directory, fabric, every=100, keep_last=1, signals=(signal.SIGUSR1,))
    GATE.clear()
    FULL.set() if full else None
    checkpoints.save(1, {"step": 1}, force=True)
    timer = threading.Timer(0.2, GATE.set)
    timer.start()
    if full:
        written: Any = checkpoints._written
        written.handle.wait()
        FULL.clear()
        fabric.barrier()
    signal.raise_signal(signal.SIGUSR1) if context.rank == 1 else None
    step = 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while not checkpoints.should_stop:
            step += 1
            checkpoints.save(step, {"step": step})
    fabric.barrier()
    found = sorted(os.listdir(directory))
    timer.join()
    with pytest.raises(SystemExit):
        checkpoints.close()
    return [step, found, [str(entry.message) for entry in caught]]


@pytest.mark.ranks
def test_what_a_signal_asks_for_is_complete_when_the_run_stops(tmp_path: Path) -> None:
    for step, found, said in run_ranks(2, _end, tmp_path / "a", False):
        assert (found, said) == (names(step), [])


@pytest.mark.ranks
def test_what_a_signal_asks_for_is_written_though_the_last_one_failed(tmp_path: Path) -> None:
    ranks = run_ranks(2, _end, tmp_path / "a", True)
    for step, found, _ in ranks:
        assert found == names(step)
    (said,) = ranks[0][2]
    assert said.startswith("`CheckpointManager` could not write the checkpoint of step 1: [Errno 28] No space left")
    assert ranks[1][2] == []


def _train(context: RankContext, directory: Path, layout: str, stop: bool, options: dict[str, Any]) -> Trained | int:
    def before(step: int) -> None:
        if stop and step == 7 and context.rank == 1:
            signal.raise_signal(signal.SIGTERM)

    try:
        return train(context.fabric(strategy=layout), directory, steps=15, before=before, **options)
    except SystemExit as ended:
        return int(str(ended.code))


@pytest.mark.ranks
@pytest.mark.parametrize("format", [None, "sharded", "safetensors"])
def test_a_run_that_is_stopped_goes_on_to_the_bit(format: str | None, tmp_path: Path) -> None:
    options = {"every": 2, "keep_last": 1, "blocking": False, "format": format, "checksum": True}
    layout = "ddp" if format is None else "fsdp"
    whole = run_ranks(2, _train, tmp_path / "whole", layout, False, {"every": timedelta(days=1)})
    assert run_ranks(2, _train, tmp_path / "run", layout, True, options) == [128 + signal.SIGTERM] * 2
    found = sorted(os.listdir(tmp_path / "run"))
    stop = int(found[0][5:13])
    assert found == names(stop)
    assert stop in (7, 8)
    for resumed, expected in zip(run_ranks(2, _train, tmp_path / "run", layout, False, options), whole, strict=True):
        assert resumed.losses == {step: loss for step, loss in expected.losses.items() if step > stop}
        assert all(map(torch.equal, resumed.parameters, expected.parameters))
