# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run of several ranks: all of them see the same, and stop at the same step."""

import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric.checkpoint import CheckpointManager
from tests.checkpoint.keeping.training import Trained, train
from tests.ranks import RankContext, run_ranks

pytestmark = pytest.mark.ranks


def _keep(context: RankContext, directory: Path, strategy: str) -> Any:
    fabric = context.fabric(strategy=strategy)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    other = directory if context.rank == 0 else directory / "elsewhere"  # rank 0's counts
    with CheckpointManager(other, fabric=fabric, keep_last=2, keep_best=("loss", "min")) as checkpoints:
        assert checkpoints.restore(state) is None
        for step in range(1, 6):
            state["step"] = step
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            # Rank 0 says that step 2 is the best, and rank 1 something else.
            assert checkpoints.save(step, state, {"loss": abs(step - 2 - context.rank)}) is not None
        left = [kept.step for kept in checkpoints.kept()]
        assert checkpoints.restore(state, "best") == {}
        return left, state["step"], checkpoints.latest(), checkpoints.best()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_see_what_rank_0_sees(tmp_path: Path, strategy: str) -> None:
    paths = [str(tmp_path / f"step-{step:08d}.ckpt") for step in (5, 2)]
    assert run_ranks(2, _keep, tmp_path, strategy) == [([2, 4, 5], 2, *paths)] * 2
    assert sorted(os.listdir(tmp_path)) == [f"step-{n:08d}.{end}" for n in (2, 4, 5) for end in ("ckpt", "json")]
    assert (tmp_path / "step-00000002.ckpt").is_dir() == (strategy == "fsdp")


def _stop(context: RankContext, directory: Path, strategy: str, asked: int, signum: int) -> int:
    def before(step: int) -> None:
        if step == 7 and context.rank == asked:
            signal.raise_signal(signum)

    with pytest.raises(SystemExit) as ended:
        train(context.fabric(strategy=strategy), directory, steps=20, every=100, before=before)
    assert signal.getsignal(signum) == signal.SIG_DFL
    return int(str(ended.value.code))


def _train(context: RankContext, directory: Path, strategy: str) -> Trained:
    return train(context.fabric(strategy=strategy), directory, steps=20, every=100)


@pytest.mark.parametrize(
    ("strategy", "asked", "signum"),
    [("ddp", 0, signal.SIGTERM), ("ddp", 1, signal.SIGUSR1), ("fsdp", 1, signal.SIGTERM)],
)
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_to_the_bit(
    tmp_path: Path, strategy: str, asked: int, signum: signal.Signals
) -> None:
    whole = run_ranks(2, _train, tmp_path / "whole", strategy)
    assert run_ranks(2, _stop, tmp_path / "run", strategy, asked, signum) == [128 + signum] * 2
    (name,) = (name for name in os.listdir(tmp_path / "run") if name.endswith(".ckpt"))
    assert name in ("step-00000007.ckpt", "step-00000008.ckpt")  # on a slow machine the step counts as a long one
    stop = int(name[5:13])
    for resumed, expected in zip(run_ranks(2, _train, tmp_path / "run", strategy), whole, strict=True):
        assert resumed.losses == {step: loss for step, loss in expected.losses.items() if step > stop}
        assert all(map(torch.equal, resumed.parameters, expected.parameters))


def _stop_at_the_end(context: RankContext, directory: Path) -> list[Any]:
    fabric = context.fabric(strategy="ddp")
    checkpoints = CheckpointManager(directory, fabric=fabric, every=100)
    checkpoints._attention._long = 1e9  # on a slow machine too
    for step in range(1, 7):
        if step == 6 and context.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        checkpoints.save(step, {})
    stopped = checkpoints.should_stop
    with pytest.raises(SystemExit) as ended:
        checkpoints.close()
    return [stopped, ended.value.code]


def test_the_last_vote_is_heard_at_the_end(tmp_path: Path) -> None:
    assert run_ranks(2, _stop_at_the_end, tmp_path) == [[False, 143]] * 2


def _tear_down_first(context: RankContext, directory: Path) -> list[Any]:
    fabric = context.fabric(strategy="ddp")
    checkpoints = CheckpointManager(directory, fabric=fabric, every=100)
    for step in range(1, 7):
        checkpoints.save(step, {})
    fabric.teardown()
    checkpoints.close()
    return [torch.distributed.is_initialized(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL]


def test_the_group_may_be_left_before_the_end(tmp_path: Path) -> None:
    assert run_ranks(2, _tear_down_first, tmp_path) == [[False, True]] * 2


def _by_time(context: RankContext, directory: Path, times: list[timedelta]) -> list[bool]:
    fabric = context.fabric(strategy="ddp")
    with CheckpointManager(directory, fabric=fabric, every=times[context.rank], signals=()) as checkpoints:
        return [checkpoints.save(step, {}) is not None for step in range(1, 6)]


def test_the_time_is_that_of_rank_0(tmp_path: Path) -> None:
    soon, late = timedelta(microseconds=1), timedelta(days=1)
    assert run_ranks(2, _by_time, tmp_path / "never", [late, soon]) == [[False] * 5] * 2
    written = run_ranks(2, _by_time, tmp_path / "often", [soon, late])
    assert written[0] == written[1]
    assert written[0][0]
    assert sum(written[0]) >= 2  # each, or every other one


class OnOneRank:
    """Its state can't be had on rank 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self._rank == 1:
            raise OSError(28, "No space left on device")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def _fail(context: RankContext, directory: Path) -> list[str]:
    fabric = context.fabric(strategy="ddp")
    errors = []
    (directory / "file").write_text("content") if context.rank == 0 else None
    with CheckpointManager(directory / "run", fabric=fabric, signals=()) as checkpoints:
        checkpoints.save(5, {"step": 5})
        for state, metrics in (
            ({"one": OnOneRank(context.rank)}, None),
            ({}, {"loss": "x" if context.rank == 0 else 1}),
        ):
            with pytest.raises((OSError, TypeError)) as error:
                checkpoints.save(6, state, metrics)
            errors.append(str(error.value))
    with CheckpointManager(directory / "run", fabric=fabric, signals=()) as checkpoints:
        with pytest.raises(ValueError, match="holds a later checkpoint") as error:
            checkpoints.save(3, {})
        errors.append(str(error.value))
    with CheckpointManager(directory / "file", fabric=fabric, signals=()) as checkpoints:
        with pytest.raises(NotADirectoryError) as error:
            checkpoints.save(1, {})
        errors.append(str(error.value))
    return errors


def test_an_error_is_the_same_on_all_ranks_and_leaves_what_there_was(tmp_path: Path) -> None:
    expected = [
        "[Errno 28] No space left on device",
        "`CheckpointManager.save(step, state, metrics)`: `metrics['loss']` is a `str`. Pass a number, or a tensor with"
        " one element.",
        f"`CheckpointManager.save(3, ...)`: `{tmp_path}/run` holds a later checkpoint, of step 5, so that `latest()`"
        " would not go on from this run. Call `restore(state)` first to go on from there, or give this run a folder of"
        " its own.",
        f"[Errno 20] Not a directory: '{tmp_path}/file'",
    ]
    assert run_ranks(2, _fail, tmp_path) == [expected] * 2
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000005.ckpt", "step-00000005.json"]


def test_it_needs_a_launched_fabric() -> None:
    from fabric import Fabric

    error = (
        "`fabric.broadcast(...)` needs the 2 processes of this run, and they are not started yet. Call"
        " `fabric.launch()` before it."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(error)}$"):
        CheckpointManager("run", fabric=Fabric(accelerator="cpu", devices=2))
