# SPDX-License-Identifier: Apache-2.0
"""A run that was killed, or stopped, and resumed ends with the very bits of one that was not."""

import json
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabric import Fabric
from tests.checkpoint import resume_job
from tests.processes.jobs import Job, python
from tests.ranks import RankContext, run_ranks

SCRIPT = str(Path(resume_job.__file__))
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.ranks


def in_pool(context: RankContext, out: Path, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A run, and the warnings of this rank."""
    strategy = resume_job.choose_strategy(options["strategy"])
    fabric = context.fabric(strategy=strategy, **resume_job.choose_precision(options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = resume_job.train(fabric, out, **options)
    return result, [str(warning.message) for warning in caught]


def run(ranks: int, out: Path, **options: Any) -> list[tuple[dict[str, Any], list[str]]]:
    out.mkdir(exist_ok=True)
    return run_ranks(ranks, in_pool, out, options)


def lines(out: Path) -> list[list[dict[str, Any]]]:
    """For each rank all that it has logged."""
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(out.glob("rank-*.log"))]


def steps(out: Path, after: int = 0) -> list[dict[int, dict[str, Any]]]:
    """For each rank what it logged of each step."""
    return [{line["step"]: line for line in log if line.get("step", 0) > after} for log in lines(out)]


# --------------------------------------------------------------------------------------------------------------------
# Killed
# --------------------------------------------------------------------------------------------------------------------
KILLED: dict[str, tuple[int, dict[str, str]]] = {
    "single": (1, {"precision": "16-mixed", "keep": "file"}),
    "ddp": (2, {"precision": "16-mixed"}),
    "fsdp": (2, {"precision": "bf16-mixed", "keep": "background"}),
    "hsdp": (4, {}),
    "tp": (2, {}),
    "cp": (2, {}),
    "pipeline": (2, {"precision": "16-mixed"}),
}


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
@pytest.mark.parametrize("strategy", KILLED)
def test_a_killed_job_goes_on_to_the_bit(strategy: str, tmp_path: Path) -> None:
    ranks, options = KILLED[strategy]
    whole = run(ranks, tmp_path / "whole", strategy=strategy, **options)
    expected = steps(tmp_path / "whole")
    out = tmp_path / "killed"
    out.mkdir()
    kill(
        start(ranks, out, strategy, options, "--wait-at", "11"), ranks, out, "one rank" if strategy == "ddp" else "all"
    )
    job = start(ranks, out, strategy, options)
    job.until(lambda: job.process.poll() is not None, "the end")  # a busy machine may take long to start it
    assert job.wait() == 0, job.stderr
    for rank, log in enumerate(lines(out)):
        assert [line for line in log if "from" in line][1]["from"] in (3, 6, 9)
        assert all(line == expected[rank][line["step"]] for line in log if "step" in line)
        assert max(line.get("step", 0) for line in log) == 14
        assert json.loads((out / f"end-{rank}.json").read_text()) == whole[rank][0]["own"]


def start(ranks: int, out: Path, strategy: str, options: dict[str, str], *more: str) -> Job:
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    words = (SCRIPT, str(out), "--devices", str(ranks), "--strategy", strategy, *flags, *more)
    return python(*words, folder=out, environ={"PYTHONPATH": str(ROOT)})


def kill(job: Job, ranks: int, out: Path, victim: str) -> None:
    """At a moment that the script has no part in, when it has begun to save for the third time at the latest."""
    chance = random.Random(f"{ranks} {victim}")
    step = chance.randint(7, 9)
    try:
        job.until(lambda: f"saving {step}\n" in job.stdout, f"step {step}")
        time.sleep(chance.uniform(0, 0.03))
        pids = job.living() if victim == "all" else [lines(out)[-1][0]["pid"]]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert job.wait() != 0
    finally:
        job.close()


# --------------------------------------------------------------------------------------------------------------------
# Stopped, and resumed by as many ranks
# --------------------------------------------------------------------------------------------------------------------
def test_gradients_of_four_ranks_are_summed_in_the_same_order_after_a_resume(tmp_path: Path) -> None:
    whole = run(4, tmp_path / "whole", strategy="ddp")
    path = str(tmp_path / "whole" / "step-00000009.ckpt")
    resumed = run(4, tmp_path / "resumed", strategy="ddp", resume=path)
    assert steps(tmp_path / "resumed") == steps(tmp_path / "whole", after=9)
    assert [result["own"] for result, _ in resumed] == [result["own"] for result, _ in whole]
    assert all(warnings == [] for _, warnings in resumed)


# --------------------------------------------------------------------------------------------------------------------
# Resumed by more ranks, or fewer
# --------------------------------------------------------------------------------------------------------------------
def test_other_numbers_of_ranks_go_on_with_the_same_samples(tmp_path: Path) -> None:
    whole = run(2, tmp_path / "two", strategy="fsdp", exact=False)
    epoch = [order(tmp_path / "two")[step] for step in range(1, 7)]
    assert sorted(i for window in epoch for batch in window for i in batch) == list(range(resume_job.SAMPLES))
    run(1, tmp_path / "one", strategy="single", exact=False, steps=9)
    assert order(tmp_path / "one") == {step: seen for step, seen in order(tmp_path / "two").items() if step <= 9}
    for before, ranks, strategy in (("two", 1, "single"), ("one", 2, "ddp"), ("two", 4, "fsdp"), ("two", 4, "tp")):
        out = tmp_path / f"{before}-{ranks}-{strategy}"
        path = str(tmp_path / before / "step-00000009.ckpt")
        resumed = run(ranks, out, strategy=strategy, exact=False, resume=path)
        assert order(out) == {step: seen for step, seen in order(tmp_path / "two").items() if step > 9}
        heard = [warnings for _, warnings in resumed]
        assert [len(warnings) for warnings in heard] == [1, *[0] * (ranks - 1)]
        assert f"saved by {1 if before == 'one' else 2} ranks, and this run has {ranks}" in heard[0][0]
        for name, value in whole[0][0]["model"].items():
            torch.testing.assert_close(
                torch.tensor(resumed[0][0]["model"][name]), torch.tensor(value), atol=1e-5, rtol=0, msg=f"{out} {name}"
            )


def order(out: Path) -> dict[int, list[list[int]]]:
    """For each step the samples of each micro-batch, in the order that all data ranks together have taken them."""
    logs = steps(out)
    taken = {}
    for step in logs[0]:
        ranks = unique([log[step]["seen"] for log in logs])
        taken[step] = [[i for row in zip(*parts, strict=True) for i in row] for parts in zip(*ranks, strict=True)]
    return taken


def unique(seen: list[list[list[int]]]) -> list[list[list[int]]]:
    """Those of a tensor group have taken the same."""
    return [samples for number, samples in enumerate(seen) if samples not in seen[:number]]


# --------------------------------------------------------------------------------------------------------------------
# Random numbers
# --------------------------------------------------------------------------------------------------------------------
def draw(context: RankContext, path: Path, strategy: str, load: bool) -> tuple[list[float], list[str]]:
    """What a rank draws after it has saved or loaded, and the warnings of this rank."""
    fabric = context.fabric(strategy=resume_job.choose_strategy(strategy))
    fabric.seed_everything(7 + context.rank, verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric.load(path, {"fabric": fabric}) if load else fabric.save(path, {"fabric": fabric})
    numbers = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    return numbers, [str(warning.message) for warning in caught]


def test_ranks_that_read_the_same_batches_draw_alike_when_they_are_seeded_anew(tmp_path: Path) -> None:
    saved = {name: [numbers for numbers, _ in run_ranks(2, draw, tmp_path / name, name, False)] for name in TWO}
    assert saved["ddp"][0] != saved["ddp"][1]
    for before, now, ranks in (("ddp", "tp", 2), ("pipeline", "tp", 2), ("ddp", "tp", 4), ("tp", "ddp", 2)):
        numbers, heard = zip(*run_ranks(ranks, draw, tmp_path / before, now, True), strict=True)
        data_ranks = [rank if now == "ddp" else rank // 2 for rank in range(ranks)]
        assert [numbers.index(drawn) for drawn in numbers] == [data_ranks.index(number) for number in data_ranks]
        assert not any(drawn in saved[before] for drawn in numbers)
        assert [len(warnings) for warnings in heard] == [1, *[0] * (ranks - 1)]
        text = f"this run has {ranks}" if ranks > 2 else "this run's share batches in another way"
        assert f"saved by 2 ranks, and {text}. Each rank is seeded anew" in heard[0][0]
    same = run_ranks(2, draw, tmp_path / "ddp", "fsdp", True)
    assert same == [(numbers, []) for numbers in saved["ddp"]]


TWO = ("ddp", "tp", "pipeline")


class DrawsWhenRestored:
    def state_dict(self) -> dict[str, int]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        torch.rand(1)


def test_random_numbers_are_restored_after_what_draws_some(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(5, verbose=False)
    state = {"fabric": fabric, "draws": DrawsWhenRestored()}
    fabric.save(tmp_path / "checkpoint.pt", state)
    expected = torch.rand(1)
    fabric.load(tmp_path / "checkpoint.pt", state)
    assert torch.equal(torch.rand(1), expected)
