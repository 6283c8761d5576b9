# SPDX-License-Identifier: Apache-2.0
"""Scripts whose other ranks run the program again, on one machine and on two."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from fabric.plugins.environments import LocalEnvironment
from fabric.strategies.launchers import ExternalLauncher, SubprocessLauncher, create_launcher
from tests.processes.jobs import Job, python, script

pytestmark = pytest.mark.ranks

JOB = """
    import json, os, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from fabric import Fabric

    act, victim, devices = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    before = dict(os.environ)
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    fabric.launch()
    fabric.barrier()
    rank = fabric.global_rank
    Path(f"ready-{rank}").write_text(str(os.getpid()))
"""


def start(folder: Path, text: str, act: str = "none", victim: int = 0, devices: int = 2, **environ: str) -> Job:
    path = script(folder, JOB + text)
    return python(path, act, str(victim), str(devices), folder=folder, environ=environ)


def test_a_job(tmp_path: Path) -> None:
    job = start(
        tmp_path,
        """
    second = Fabric(accelerator="cpu", devices=2)
    second.launch()  # joins
    assert second.world_size == 2 and second.global_rank == rank
    assert dict(os.environ) == before
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    Path(f"result-{rank}").write_text(json.dumps([total.item(), torch.get_num_threads(), fabric.local_rank]))
    if rank == 0:
        while os.path.exists(f"/proc/{Path('ready-1').read_text()}"):
            time.sleep(0.01)
        time.sleep(0.1)
        try:
            Fabric(accelerator="cpu", devices=2).launch()
        except RuntimeError as error:
            Path("refused").write_text(str(error))
    """,
        OMP_NUM_THREADS="",
    )
    assert job.wait() == 0, job.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert job.said("result-0") == f"[3.0, {threads}, 0]"
    assert job.said("result-1") == f"[3.0, {threads}, 1]"
    assert job.said("refused") == (
        "`fabric.launch()`: this process has launched before, and ranks that it started have ended since."
        " A process launches once: start a process of its own for each job."
    )
    assert job.stderr == ""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_leaves_while_the_other_communicates(tmp_path: Path, victim: int) -> None:
    job = start(
        tmp_path,
        """
    if rank == victim:
        sys.exit(0)
    dist.all_reduce(torch.ones(1))
    """,
        victim=victim,
    )
    assert job.wait() == 1, job.stderr
    assert f"rank {victim} on host" in job.last_line
    assert job.last_line.endswith(
        f"failed first: its script ended while rank {1 - victim} still communicated with it. All ranks have ended."
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_data_workers_end_too(tmp_path: Path, victim: int) -> None:
    job = start(
        tmp_path,
        """
    loader = torch.utils.data.DataLoader(range(10**6), num_workers=2, persistent_workers=True)
    for index, batch in enumerate(loader):
        Path(f"loading-{rank}").write_text(str(os.getpid()))
        time.sleep(0.05)
    """,
    )
    pids = [int(job.said("loading-0")), int(job.said("loading-1"))]
    job.until(lambda: len(job.living()) >= 6, "two ranks and their four workers")
    os.kill(pids[victim], signal.SIGKILL)
    started = time.monotonic()
    job.until(lambda: not set(pids) & set(job.living()), "the ranks to end")
    assert time.monotonic() - started < 3
    assert job.wait() == (-9 if victim == 0 else 137)
    assert time.monotonic() - started < 10


MACHINES = """
    if rank == victim:
        time.sleep(0.3)
        if act == "raise":
            raise ValueError("boom")
        if act == "exit":
            os._exit(17)
        if act == "vanish":
            os.kill(os.getpid(), 9)
    if act == "none":
        time.sleep(2.0 if rank == 3 else 0.0)
        Path(f"done-{rank}").write_text("yes")
    elif rank != victim:
        dist.all_reduce(torch.ones(1))
"""


def machines(folder: Path, act: str, victim: int) -> tuple[Job, Job]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "4"}
    first = start(folder / "0", MACHINES, act, victim, NODE_RANK="0", **common)
    return first, start(folder / "1", MACHINES, act, victim, NODE_RANK="1", **common)


def test_two_machines(tmp_path: Path) -> None:
    first, second = machines(tmp_path, "none", 0)
    assert (second.wait(), first.wait()) == (0, 0), first.stderr + second.stderr
    assert [first.said("done-0"), first.said("done-1"), second.said("done-2"), second.said("done-3")] == ["yes"] * 4
    assert first.stderr == second.stderr == ""


@pytest.mark.parametrize(
    ("act", "code", "how"), [("raise", 1, "ValueError: boom (exit code 1)"), ("exit", 17, "exit code 17")]
)
def test_both_machines_name_the_rank_that_failed(tmp_path: Path, act: str, code: int, how: str) -> None:
    first, second = machines(tmp_path, act, 3)
    pid = second.said("ready-3")
    assert (first.wait(), second.wait()) == (code, code), first.stderr + second.stderr
    line = f"fabric: rank 3 on host `{socket.gethostname()}` (pid {pid}) failed first: {how}. All ranks have ended."
    assert first.last_line == second.last_line == line


def test_a_machine_that_vanishes(tmp_path: Path) -> None:
    first, second = machines(tmp_path, "vanish", 2)
    assert (first.wait(), second.wait()) == (1, -9), first.stderr + second.stderr
    line = f"rank 2 on host `{socket.gethostname()}` (pid {second.pid}) failed first: its process is gone."
    assert first.last_line == f"fabric: {line} All ranks have ended."


def test_the_machine_of_the_store_vanishes(tmp_path: Path) -> None:
    first, second = machines(tmp_path, "vanish", 0)
    assert (first.wait(), second.wait()) == (-9, 1), first.stderr + second.stderr
    line = "its store does not answer any more, so that machine or its rank 0 is gone. All ranks have ended."
    assert second.last_line == f"fabric: rank 0 on host `127.0.0.1` failed first: {line}"


def test_which_launcher() -> None:
    one, two = LocalEnvironment(1), LocalEnvironment(2)
    assert isinstance(create_launcher("none", environment=one, threads=None), ExternalLauncher)
    assert isinstance(create_launcher("external", environment=one, threads=None), ExternalLauncher)
    assert isinstance(create_launcher("subprocess", environment=two, threads=1), SubprocessLauncher)
