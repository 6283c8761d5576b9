# SPDX-License-Identifier: Apache-2.0
"""Functions that run in spawned and forked ranks."""

import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric.plugins.environments import LocalEnvironment
from fabric.strategies.launchers import MultiprocessingLauncher, create_launcher
from tests.processes.jobs import python, script

pytestmark = pytest.mark.ranks

FUNCTIONS = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    from fabric import Fabric

    def fabric(strategy="ddp_fork"):
        return Fabric(accelerator="cpu", devices=2, strategy=strategy)

    def total(fabric, scale):
        value = torch.full((2,), float(scale * (fabric.global_rank + 1)))
        dist.all_reduce(value)
        return {"total": value, "threads": torch.get_num_threads(), "session": os.getsid(0) == os.getpid()}

    def large(fabric):
        return torch.arange(20_000_000)

    def nothing(fabric):
        return None

    def failing(fabric, rank):
        if fabric.global_rank == rank:
            raise ValueError("boom")
        time.sleep(60)

    def killed(fabric):
        if fabric.global_rank == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()

    def exiting(fabric):
        if fabric.global_rank == 0:
            sys.exit(5)
        time.sleep(60)

    def unpicklable(fabric):
        return lambda: 1

    def outcome(function, *args):
        try:
            return fabric().launch(function, *args)
        except SystemExit as error:
            return error.code, str(error)
"""


def test_forked_ranks(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        FUNCTIONS
        + """
    torch.ones(512, 512) @ torch.ones(512, 512)  # OpenMP runs: a forked rank with more than one thread would hang
    result = fabric().launch(total, 2)
    assert result == {"total": result["total"], "threads": 1, "session": True}
    assert torch.equal(result["total"], torch.tensor([6.0, 6.0]))
    assert torch.equal(fabric().launch(large), torch.arange(20_000_000))
    assert fabric().launch(nothing) is None
    for rank in (0, 1):
        code, report = outcome(failing, rank)
        assert code == 1
        assert report.count("Traceback") == 1 and report.endswith(
            "failed first: ValueError: boom (exit code 1). All ranks have ended.\\n"
        )
        assert f"fabric: rank {rank} on host" in report
    assert outcome(killed)[0] == 137
    assert outcome(exiting)[0] == 5
    assert "`fabric.launch(fn)` returns what `fn` returned on rank 0 by pickling it, which fails for `function`" in (
        outcome(unpicklable)[1]
    )
    fabric().launch(killed)
""",
    )
    job = python(path, folder=tmp_path)
    assert job.wait() == 137, job.stderr
    assert job.last_line.endswith(
        "failed first: SIGKILL (signal 9); the system sends it when memory runs out. All ranks have ended."
    )


def test_spawned_ranks(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        FUNCTIONS
        + """
    if __name__ == "__main__":
        result = fabric("ddp_spawn").launch(total, 2)
        assert torch.equal(result["total"], torch.tensor([6.0, 6.0]))
        assert result["session"]
        print("done")
""",
    )
    job = python(path, folder=tmp_path)
    assert job.wait() == 0, job.stderr
    assert job.stdout == "done\n"


def test_ctrl_c_ends_forked_ranks(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        FUNCTIONS
        + """
    def sleeping(fabric):
        try:
            open(f"ready-{fabric.global_rank}", "w").write(str(os.getpid()))
            time.sleep(60)
        finally:
            open(f"finally-{fabric.global_rank}", "w").write("ran")

    fabric().launch(sleeping)
""",
    )
    job = python(path, folder=tmp_path)
    job.said("ready-0"), job.said("ready-1")
    job.send_to_group(signal.SIGINT)
    assert job.wait() == -signal.SIGINT
    assert (job.said("finally-0"), job.said("finally-1")) == ("ran", "ran")
    assert job.last_line == "KeyboardInterrupt"


def launcher(method: str = "fork") -> MultiprocessingLauncher:
    created = create_launcher(method, environment=LocalEnvironment(2), threads=None)
    assert isinstance(created, MultiprocessingLauncher)
    return created


def test_cannot_fork_once_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError) as caught:
        launcher().launch(print)
    assert str(caught.value) == (
        "`fabric.launch(fn)` cannot fork any more: CUDA is initialised in this process, and a fork could not use it."
        " Restart the kernel and call `launch` before anything touches the GPU, or write"
        ' `Fabric(strategy="ddp_spawn")` in a script.'
    )


def test_cannot_fork_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError) as caught:
        launcher().launch(print)
    assert str(caught.value) == (
        "`fabric.launch(fn)` cannot fork on macOS: its system libraries do not survive it."
        ' Put the code into a script and write `Fabric(strategy="ddp")` or `"ddp_spawn"`.'
    )


def test_one_process_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError) as caught:
        launcher("spawn").launch(print)
    assert str(caught.value) == ("`fabric.launch(fn)` starts one process on Windows. Write `devices=1`, or use WSL.")


def test_a_spawned_rank_cannot_see_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed_in() -> None: ...

    typed_in.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    with pytest.raises(RuntimeError) as caught:
        launcher("spawn").launch(typed_in)
    assert str(caught.value) == (
        "`fabric.launch(fn)` by spawn imports `fn` in new processes, which cannot see a function that was typed into a"
        ' notebook or a prompt. Write `Fabric(strategy="ddp_notebook")`, or put the function into a module.'
    )


def test_a_local_function_cannot_be_sent() -> None:
    def local(*_: Any) -> None: ...

    with pytest.raises(TypeError) as caught:
        launcher("spawn").launch(local)
    assert str(caught.value) == (
        "`fabric.launch(fn)` by spawn sends `fn`, its arguments and the strategy to new processes by pickling, which"
        " fails: Can't pickle local object 'test_a_local_function_cannot_be_sent.<locals>.local'."
        ' Define the function at the top of a module, or fork: `Fabric(strategy="ddp_fork")`.'
    )
    assert not [name for name in os.listdir("/tmp") if name == "fabric-"]
