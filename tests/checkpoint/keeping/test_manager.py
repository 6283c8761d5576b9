# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run in one process. Several ranks are in test_ranks.py, whole jobs in test_preemption.py."""

import fcntl
import os
import re
import signal
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric import Fabric
from fabric.checkpoint import CheckpointManager
from fabric.checkpoint.keeping.folder import open_folder
from tests.checkpoint.keeping.training import train


def texts(error: str) -> str:
    return f"^{re.escape(error)}$"


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture(params=["", "memory://"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}{uuid.uuid4().hex}" if request.param else f"{tmp_path}/run"


def steps_of(checkpoints: CheckpointManager) -> list[int]:
    return [kept.step for kept in checkpoints.kept()]


def test_the_last_and_the_best_stay(fabric: Fabric, directory: str) -> None:
    with CheckpointManager(directory, fabric=fabric, keep_last=2, keep_best=("loss", "min"), every=2) as checkpoints:
        written = [checkpoints.save(step, {"step": step}, {"loss": abs(step - 4)}) for step in range(1, 11)]
        assert written == [f"{directory}/step-{n:08d}.ckpt" if n % 2 == 0 else None for n in range(1, 11)]
        assert [(kept.step, kept.metrics) for kept in checkpoints.kept()] == [
            (4, {"loss": 0.0}),
            (8, {"loss": 4.0}),
            (10, {"loss": 6.0}),
        ]
        assert checkpoints.latest() == f"{directory}/step-00000010.ckpt"
        assert checkpoints.best() == f"{directory}/step-00000004.ckpt"
    names = [f"step-{n:08d}.{end}" for n in (4, 8, 10) for end in ("ckpt", "json")]
    assert sorted(open_folder(directory).names()) == names


def test_restoring(fabric: Fabric, directory: str) -> None:
    with CheckpointManager(directory, fabric=fabric, keep_best=("loss", "max")) as checkpoints:
        state: dict[str, Any] = {"step": 0}
        assert checkpoints.restore(state) is None
        assert checkpoints.restore(state, "best") is None
        assert checkpoints.restore(state, 3) is None
        assert (checkpoints.latest(), checkpoints.best(), checkpoints.kept()) == (None, None, [])
        for step in (1, 2, 3):
            checkpoints.save(step, {"step": step, "more": "x" * step}, {"loss": -abs(step - 2)})
        for which, step in (("latest", 3), ("best", 2), (1, 1)):
            assert checkpoints.restore(state, which) == {"more": "x" * step}  # type: ignore[arg-type]
            assert state == {"step": step}


def test_a_new_manager_finds_what_an_earlier_one_wrote_and_goes_on(fabric: Fabric, directory: str) -> None:
    with CheckpointManager(directory, fabric=fabric, keep_last=2, keep_best=("loss", "min")) as checkpoints:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.2), (4, 0.3)):
            checkpoints.save(step, {"step": step}, {"loss": loss})
    with CheckpointManager(directory, fabric=fabric, keep_last=1, keep_best=("loss", "min"), every=3) as checkpoints:
        assert steps_of(checkpoints) == [2, 3, 4]
        state = {"step": 0}
        checkpoints.restore(state)
        assert [step for step in range(5, 10) if checkpoints.save(step, state)] == [6, 9]
        assert steps_of(checkpoints) == [2, 9]


def test_the_step_counts_and_not_the_time(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric) as checkpoints:
        for step in (9, 10, 100_000_000, 1_000_000_000):
            checkpoints.save(step, {"step": step})
        os.utime(tmp_path / "step-00000009.ckpt", (2e9, 2e9))
        assert steps_of(checkpoints) == [9, 10, 100_000_000, 1_000_000_000]
        assert checkpoints.latest() == str(tmp_path / "step-1000000000.ckpt")


def test_what_is_not_complete_is_not_there_and_is_removed_later(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric, keep_last=2) as checkpoints:
        checkpoints.save(1, {"step": 1})
        # What kills leave: a note alone, a file half written, a folder without its marker.
        for step in (2, 3, 4):
            (tmp_path / f"step-{step:08d}.json").write_text(f'{{"step": {step}, "metrics": {{}}}}')
        (tmp_path / ".step-00000003.ckpt.0123abcd.tmp").write_text("half")
        (tmp_path / "step-00000004.ckpt" / "data-0123abcd").mkdir(parents=True)
        (tmp_path / "step-00000004.ckpt" / "data-0123abcd" / "__0_0.distcp").write_text("half")
        assert checkpoints.latest() == str(tmp_path / "step-00000001.ckpt")
        assert steps_of(checkpoints) == [1]
        checkpoints.save(5, {"step": 5})
        assert sorted(os.listdir(tmp_path)) == [f"step-0000000{n}.{end}" for n in (1, 5) for end in ("ckpt", "json")]


@pytest.mark.parametrize("left", ["data-0123abcd/__0_0.distcp", ".model.safetensors.0123abcd.tmp"])
def test_what_a_kill_left_of_a_step_is_in_nobodys_way(left: str, fabric: Fabric, tmp_path: Path) -> None:
    """The run goes on from an earlier step, with another strategy."""
    path = tmp_path / "step-00000003.ckpt"
    (path / left).parent.mkdir(parents=True)
    (path / left).write_text("half")
    (tmp_path / "step-00000003.json").write_text('{"step": 3, "metrics": {}}')
    with CheckpointManager(tmp_path, fabric=fabric) as checkpoints:
        assert checkpoints.save(3, {"step": 3}) == str(path)
        assert checkpoints.restore({}) == {"step": 3}


def test_what_others_put_there_stays(fabric: Fabric, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-7.ckpt").write_text("mine")
    (tmp_path / ".step-00000002.ckpt.0123abcd.tmp").write_text("somebody is writing it")
    (tmp_path / "step-00000001.ckpt").write_text("mine")  # without a note
    (tmp_path / "folder").mkdir()
    foreign = sorted(os.listdir(tmp_path))
    checkpoints = CheckpointManager(tmp_path, fabric=fabric, keep_last=1)
    with (tmp_path / ".step-00000002.ckpt.0123abcd.tmp").open("rb") as writing, checkpoints:
        fcntl.flock(writing, fcntl.LOCK_EX)
        for step in (2, 3, 4, 5):
            checkpoints.save(step, {"step": step})
        (tmp_path / "step-00000005.ckpt").rename(tmp_path / "precious.ckpt")
        checkpoints.save(6, {"step": 6})
        assert steps_of(checkpoints) == [1, 6]
    own = ["step-00000006.ckpt", "step-00000006.json"]
    assert sorted(os.listdir(tmp_path)) == sorted([*foreign, "precious.ckpt", *own])


def test_what_others_put_there_is_not_overwritten(fabric: Fabric, tmp_path: Path) -> None:
    path = tmp_path / "step-00000003.ckpt"
    path.write_text("mine")
    with CheckpointManager(tmp_path, fabric=fabric) as checkpoints:
        error = (
            f"`{path}` was not written by a `CheckpointManager`: `step-00000003.json` is not beside it."
            " Move it away, or give this run a folder of its own."
        )
        with pytest.raises(FileExistsError, match=texts(error)):
            checkpoints.save(3, {"step": 3})
    assert path.read_text() == "mine"


@pytest.mark.parametrize("content", [None, "", "{", '{"step": 9, "metrics": {"loss": 0}}'])
def test_notes_may_be_lost_or_damaged(fabric: Fabric, tmp_path: Path, content: str | None) -> None:
    with CheckpointManager(tmp_path, fabric=fabric, keep_last=1, keep_best=("loss", "min")) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"step": step}, {"loss": step})
        for step in (1, 2):
            note = tmp_path / f"step-0000000{step}.json"
            note.unlink() if content is None else note.write_text(content)
        assert checkpoints.latest() == str(tmp_path / "step-00000002.ckpt")
        assert checkpoints.best() is None
        state = {"step": 0}
        assert checkpoints.restore(state) == {}
        assert state == {"step": 2}


def test_the_folder_of_another_run_is_not_mixed_with_this_one(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric) as checkpoints:
        checkpoints.save(5, {"step": 5})
    with CheckpointManager(tmp_path, fabric=fabric, every=100) as checkpoints:
        error = (
            f"`CheckpointManager.save(1, ...)`: `{tmp_path}` holds a later checkpoint, of step 5, so that `latest()`"
            " would not go on from this run. Call `restore(state)` first to go on from there, or give this run a folder"
            " of its own."
        )
        with pytest.raises(ValueError, match=texts(error)):
            checkpoints.save(1, {"step": 1})
        checkpoints.save(5, {"step": 5})  # the same step once more is no other run
    assert sorted(os.listdir(tmp_path)) == ["step-00000005.ckpt", "step-00000005.json"]


def test_forcing_and_writing_a_step_again(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric, keep_best=("loss", "min"), every=10) as checkpoints:
        assert checkpoints.save(3, {"a": 1}) is None
        assert checkpoints.save(3, {"a": 2}, force=True) is not None
        assert checkpoints.save(3, {"a": 3}, force=True) is None
        assert fabric.load(tmp_path / "step-00000003.ckpt") == {"a": 2}
        assert checkpoints.best() is None
        assert checkpoints.save(3, {"a": 4}, {"loss": torch.tensor(0.5)}, force=True) is not None
        assert fabric.load(tmp_path / "step-00000003.ckpt") == {"a": 4}
        assert [kept.metrics for kept in checkpoints.kept()] == [{"loss": 0.5}]
        assert checkpoints.save(4, {"a": 5}) is None


def test_by_time(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric, every=timedelta(days=1)) as checkpoints:
        assert [checkpoints.save(step, {}) for step in range(5)] == [None] * 5
    with CheckpointManager(tmp_path, fabric=fabric, every=timedelta(microseconds=1)) as checkpoints:
        assert None not in [checkpoints.save(step, {}) for step in range(5)]


def test_what_can_not_be_removed_costs_a_warning(fabric: Fabric, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001.ckpt"
    with CheckpointManager(tmp_path, fabric=fabric, keep_last=1) as checkpoints:
        checkpoints.save(1, {"step": 1})
        (tmp_path / "step-00000001.json").unlink()
        (tmp_path / "step-00000001.json").mkdir()  # a note that can't be read
        warning = f"`CheckpointManager` could not remove old checkpoints of `{tmp_path}`: [Errno 21] Is a directory: "
        with pytest.warns(UserWarning, match=f"^{re.escape(warning)}"):
            checkpoints.save(2, {"step": 2})
        assert folder.exists()
        (tmp_path / "step-00000001.json").rmdir()
        assert steps_of(checkpoints) == [1, 2]


def test_what_somebody_reads_stays_until_the_next_save(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric, keep_last=1) as checkpoints:
        checkpoints.save(1, {"step": 1})

        class Slow:
            """Loading it takes the time of a save."""

            def state_dict(self) -> dict[str, Any]:
                return {}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                assert checkpoints.save(2, {"step": 2}) is not None
                assert steps_of(checkpoints) == [1, 2]

        checkpoints.save(1, {"slow": Slow()}, {}, force=True)
        reader = CheckpointManager(tmp_path, fabric=fabric, signals=())
        assert reader.restore({"slow": Slow()}) == {}
        checkpoints.save(3, {"step": 3})
        assert steps_of(checkpoints) == [3]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_stops_and_ends_the_job_afterwards(
    fabric: Fabric, tmp_path: Path, signum: signal.Signals
) -> None:
    def before(step: int) -> None:
        if step == 7:
            signal.raise_signal(signum)

    whole = train(fabric, tmp_path / "whole", steps=20, every=100)
    with pytest.raises(SystemExit) as ended:
        train(fabric, tmp_path / "run", steps=20, every=100, before=before)
    assert ended.value.code == 128 + signum
    assert signal.getsignal(signum) == signal.SIG_DFL
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000007.ckpt", "step-00000007.json"]
    resumed = train(fabric, tmp_path / "run", steps=20, every=100)
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > 7}
    assert all(map(torch.equal, resumed.parameters, whole.parameters))


def stop_in_a_block(checkpoints: CheckpointManager, done: list[str]) -> None:
    with checkpoints:
        assert checkpoints.save(1, {}) is None
        signal.raise_signal(signal.SIGTERM)
        assert not checkpoints.should_stop
        assert checkpoints.save(2, {}) is not None
        assert checkpoints.should_stop
        assert checkpoints.save(3, {}) is None  # who goes on all the same gets no checkpoint for each step
        done.append("the rest of the block")
    done.append("what follows it")


def test_the_signal_waits_for_the_end_of_the_block(fabric: Fabric, tmp_path: Path) -> None:
    done: list[str] = []
    with pytest.raises(SystemExit) as ended:
        stop_in_a_block(CheckpointManager(tmp_path, fabric=fabric, every=100), done)
    assert (ended.value.code, done) == (143, ["the rest of the block"])


def test_a_signal_that_no_save_saw_has_its_effect_too(fabric: Fabric, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, fabric=fabric)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        checkpoints.close()
    assert ended.value.code == 143
    checkpoints.close()  # once is enough


def fail_in_a_block(checkpoints: CheckpointManager) -> None:
    with checkpoints:
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError


def test_an_error_in_the_block_stays_the_error(fabric: Fabric, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fail_in_a_block(CheckpointManager(tmp_path, fabric=fabric))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_the_users_has_the_last_word(fabric: Fabric, tmp_path: Path) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: calls.append(signum))
    try:
        with CheckpointManager(tmp_path, fabric=fabric, every=100) as checkpoints:
            signal.raise_signal(signal.SIGTERM)
            assert checkpoints.save(1, {}) is not None
            assert checkpoints.should_stop
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM]


def test_signals_can_be_left_alone_and_come_back_with_the_last_reference(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric, signals=()):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    checkpoints = CheckpointManager(tmp_path, fabric=fabric)
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    del checkpoints
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_path_through_a_file(fabric: Fabric, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    error = f"[Errno 20] Not a directory: '{tmp_path / 'file'}'"
    checkpoints = CheckpointManager(tmp_path / "file", fabric=fabric)
    with checkpoints, pytest.raises(NotADirectoryError, match=texts(error)):
        checkpoints.save(1, {})


class Broken:
    """Its state can't be had."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_a_save_that_fails_leaves_the_others_and_no_note(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric, keep_last=1) as checkpoints:
        checkpoints.save(1, {"step": 1})
        with pytest.raises(OSError, match=texts("[Errno 28] No space left on device")):
            checkpoints.save(2, {"broken": Broken()})
        assert sorted(os.listdir(tmp_path)) == ["step-00000001.ckpt", "step-00000001.json"]
        with pytest.raises(OSError, match=texts("[Errno 28] No space left on device")):
            checkpoints.save(1, {"broken": Broken()}, {}, force=True)
        assert checkpoints.restore({"step": 0}) == {}


def test_a_checkpoint_that_could_not_be_written_is_still_due(fabric: Fabric, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fabric=fabric, every=10) as checkpoints:
        with pytest.raises(OSError, match=texts("[Errno 28] No space left on device")):
            checkpoints.save(10, {"broken": Broken()})
        assert checkpoints.save(11, {"step": 11}) == str(tmp_path / "step-00000011.ckpt")
        assert checkpoints.save(12, {"step": 12}) is None
