# SPDX-License-Identifier: Apache-2.0
"""Whichever rank ends, and however: the first failure is named, its code is the job's, and no process is left."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.processes.jobs import Job, fabric_run, python, script

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")]

SCRIPT = """
    import atexit, os, sys, threading, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from fabric import Fabric

    folder, victim, act, moment = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    fabric = Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    rank = fabric.global_rank
    other = folder / f"ready-{1 - rank}"
    atexit.register(lambda: (folder / f"atexit-{rank}").write_text("ran"))

    class Explosive:
        def __reduce__(self):
            raise ValueError("boom")

    def ready():
        path = folder / f"ready-{rank}"
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)

    def wait_for_other():
        while not other.exists():
            time.sleep(0.01)
        time.sleep(0.3)  # until it is where it wants to be

    def exit_soon():
        wait_for_other()
        os._exit(17)

    def be_victim_in_python():
        ready()
        wait_for_other()
        if act == "raise":
            raise ValueError("boom")
        if act == "exit":
            os._exit(17)
        time.sleep(60)

    def be_victim_in_collective():
        if act == "exit":
            threading.Thread(target=exit_soon, daemon=True).start()
        ready()
        if act == "raise":
            wait_for_other()
            dist.all_gather_object([None, None], Explosive())
        dist.all_reduce(torch.ones(1))

    try:
        if moment == "after":
            fabric.barrier()
        if rank == victim:
            be_victim_in_collective() if moment == "inside" else be_victim_in_python()
        elif moment == "before":
            ready()
            dist.all_reduce(torch.ones(1))
        else:
            ready()
            time.sleep(60)
    finally:
        (folder / f"finally-{rank}").write_text("ran")
"""
MOMENTS = ("before", "inside", "after")
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}
CODES = {"raise": 1, "exit": 17, "kill": 137, "term": 143, "interrupt": 130}
HOW = {
    "raise": "ValueError: boom (exit code 1)",
    "exit": "exit code 17",
    "kill": "SIGKILL (signal 9); the system sends it when memory runs out",
    "term": "SIGTERM (signal 15)",
    "interrupt": "SIGINT (signal 2)",
}


@pytest.mark.parametrize("act", CODES)
@pytest.mark.parametrize(("way", "victim"), [("python", 0), ("python", 1), ("fabric run", None)])
def test_all_ranks_end_when_one_does(tmp_path: Path, way: str, victim: int | None, act: str) -> None:
    # The three moments at once: most of the time goes into `import torch`, half of it on one core.
    victims = victims_of(victim, act)
    jobs = {moment: start(tmp_path / moment, way, victims[moment], act, moment) for moment in MOMENTS}
    try:
        pids = {moment: strike(job, victims[moment], act) for moment, job in jobs.items()}
        for moment, job in jobs.items():
            check(job, way, victims[moment], act, pids[moment])
    finally:
        for job in jobs.values():
            job.close()


def victims_of(victim: int | None, act: str) -> dict[str, int]:
    """Which rank ends, by moment. None: one after the other, as ranks that something else has started are alike."""
    first = list(CODES).index(act) % 2
    turns = (first, 1 - first, first) if victim is None else (victim,) * 3
    return dict(zip(MOMENTS, turns, strict=True))


def start(folder: Path, way: str, victim: int, act: str, moment: str) -> Job:
    words = (script(folder, SCRIPT), str(folder), str(victim), act, moment)
    return python(*words, folder=folder) if way == "python" else fabric_run("--devices", "2", *words, folder=folder)


def strike(job: Job, victim: int, act: str) -> tuple[int, int]:
    """Do to the victim what it does not do itself; returns the pids of the ranks."""
    pids = int(job.said("ready-0")), int(job.said("ready-1"))
    if act in SIGNALS:
        time.sleep(0.3)  # until both are where they want to be
        if act == "interrupt":
            job.send_to_group(signal.SIGINT) if victim == 0 else os.killpg(pids[1], signal.SIGINT)
        else:
            os.kill(pids[victim], SIGNALS[act])
    return pids


def check(job: Job, way: str, victim: int, act: str, pids: tuple[int, int]) -> None:
    code = job.wait()
    rank_0_vanished = way == "python" and victim == 0 and act in ("exit", "kill")
    assert code == (-9 if rank_0_vanished and act == "kill" else CODES[act]), job.stderr
    assert job.last_line == last_line(victim, act, pids, vanished=rank_0_vanished), job.stderr
    if act == "raise":
        assert f"fabric: the traceback of rank {victim} on host" in job.stderr
        assert job.stderr.count("Traceback (most recent call last)") == 1
    if victim == 1 or act in ("raise", "term", "interrupt"):  # rank 0 had a chance
        assert job.said("finally-0") == "ran"
        assert job.said("atexit-0") == "ran"


def last_line(victim: int, act: str, pids: tuple[int, int], *, vanished: bool) -> str:
    who = f"rank {victim} on host `{socket.gethostname()}` (pid {pids[victim]})"
    if vanished:
        end = f"Rank 1 (pid {pids[1]}) and the other ranks of this machine end too."
        return f"fabric: rank 0 (pid {pids[0]}) is gone. {end}"
    if victim == 0 and act in ("term", "interrupt"):
        return f"fabric: {who} got {HOW[act]}. All ranks have ended."
    return f"fabric: {who} failed first: {HOW[act]}. All ranks have ended."
