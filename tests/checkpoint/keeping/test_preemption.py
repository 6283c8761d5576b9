# SPDX-License-Identifier: Apache-2.0
"""Whole jobs that a signal ends, whoever gets it: the last finished step is in a checkpoint, and the run goes on."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.checkpoint.keeping.training import Trained, train
from tests.processes.jobs import Job, fabric_run, python, script
from tests.ranks import RankContext, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")]

ROOT = str(Path(__file__).parents[3])
SCRIPT = """
    import os, time
    from pathlib import Path
    from fabric import Fabric
    from tests.checkpoint.keeping.training import train

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    rank, last = fabric.global_rank, 0

    def say(name, text):
        Path(f"{name}-{rank}.new").write_text(str(text))
        os.rename(f"{name}-{rank}.new", f"{name}-{rank}")

    def before(step):
        global last
        last = step - 1
        if step == 5:
            say("ready", os.getpid())
            while not Path("go").exists():
                time.sleep(0.01)

    try:
        train(fabric, "run", steps=10**9, every=10**9, before=before)
    finally:
        say("finished", last + 1)
"""
# Those whose checkpoints are written by threads, one after each step.
IN_BACKGROUND = ("python, USR1 to rank 1", "fabric run, USR1")
# Who gets it: ranks by number, or the process that was started.
CASES = {
    "python, rank 0": ("python", [0], signal.SIGTERM),
    "python, all": ("python", [0, 1], signal.SIGTERM),
    "python, USR1 to rank 1": ("python", [1], signal.SIGUSR1),
    "fabric run": ("fabric run", [], signal.SIGTERM),
    "fabric run, USR1": ("fabric run", [], signal.SIGUSR1),
}


def _train(context: RankContext, directory: Path, steps: int) -> Trained:
    return train(context.fabric(strategy="ddp"), directory, steps=steps, every=10**9)


@pytest.mark.parametrize("pair", [list(CASES)[:3], list(CASES)[3:]], ids=["python", "fabric run"])
def test_a_signal_costs_no_step(tmp_path: Path, pair: list[str]) -> None:
    texts = dict.fromkeys(pair, SCRIPT)
    for case in IN_BACKGROUND:
        texts[case] = SCRIPT.replace("every=10**9", "every=1, keep_last=1, blocking=False")
    # At once: the most time is `import torch`.
    jobs = {case: start(tmp_path / case, CASES[case][0], texts[case]) for case in pair}
    try:
        stops = {case: strike(job, *CASES[case][1:]) for case, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.close()
    whole = run_ranks(2, _train, tmp_path / "whole", 20)
    for case, stop in stops.items():
        resumed = run_ranks(2, _train, tmp_path / case / "run", 20)
        for rest, expected in zip(resumed, whole, strict=True):
            assert rest.losses == {step: loss for step, loss in expected.losses.items() if step > stop}
            assert all(map(torch.equal, rest.parameters, expected.parameters))


def start(folder: Path, way: str, text: str) -> Job:
    path, environ = script(folder, text), {"PYTHONPATH": ROOT}
    if way == "python":
        return python(path, folder=folder, environ=environ)
    return fabric_run("--devices", "2", path, folder=folder, environ=environ)


def strike(job: Job, ranks: list[int], signum: signal.Signals) -> int:
    """Send the signal in the middle of step 5; returns the step of the checkpoint that is there afterwards."""
    pids = [int(job.said(f"ready-{rank}")) for rank in (0, 1)]
    for pid in [pids[rank] for rank in ranks] or [job.pid]:
        os.kill(pid, signum)
    (job.folder / "go").touch()
    assert job.wait() == 128 + signum, job.stderr
    finished = {int(job.said(f"finished-{rank}")) for rank in (0, 1)}
    assert len(finished) == 1
    (stop,) = finished
    assert sorted(os.listdir(job.folder / "run")) == [f"step-{stop:08d}.ckpt", f"step-{stop:08d}.json"]
    assert stop < 20
    return stop
