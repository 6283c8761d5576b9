# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: it leaves the process, the machine and the working directory as it found them."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import pool_pids

# Processes that the standard library keeps for the life of this process once something has used them.
KEPT_BY_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

# Variables that pytest, and PyTorch when it imports its compiler (which a first optimizer does), set themselves.
SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


# Their tests wait for whole jobs and share nothing. Those of any other file share what they have computed.
TESTS_OF_THEIR_OWN = ("test_examples.py", "test_kill.py", "test_launch.py", "test_subprocess.py")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several pytest workers, let one take a file as a whole, but for the files of long tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if Path(file).name in TESTS_OF_THEIR_OWN else file

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _working_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run in an empty directory that must stay empty. A test that writes relative paths changes to `tmp_path` first."""
    directory = tmp_path_factory.mktemp("cwd")
    with pytest.MonkeyPatch.context() as patch:  # not the fixture: a test's own patches end before this ends
        patch.chdir(directory)
        yield
    left = sorted(entry.name for entry in directory.iterdir())
    directory.rmdir() if not left else None
    assert not left, f"the test left files in the working directory: {left}"


@pytest.fixture(autouse=True)
def _no_leaks(_working_directory: None) -> Iterator[None]:
    """Fail a test that leaks environment variables, a process group, threads, child processes or process-wide state."""
    before = {what: look() for what, look in STATE.items()}
    threads, children = _threads(), _children()
    yield
    changes = {what: (value, STATE[what]()) for what, value in before.items() if STATE[what]() != value}
    if dist.is_initialized():
        dist.destroy_process_group()
        changes["process group"] = ("none", "initialised")
    if changes:
        _restore(before)
    left = [f"the test changed {what}: {_difference(*values)}" for what, values in changes.items()]
    left += [f"the test left a thread: {t}" for t in _settled(_threads, threads)]
    left += [f"the test left a process: {pid} {_command(pid)}" for pid in _settled(_children, children)]
    assert not left, "\n".join(left)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_OTHERS}


def _handlers() -> dict[str, Any]:
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    handlers: dict[str, Any] = {"sys.excepthook": sys.excepthook} | {s.name: signal.getsignal(s) for s in watched}
    # The first loader with workers installs PyTorch's own handler, for the life of the process.
    if getattr(handlers["SIGCHLD"], "__module__", "").startswith("torch.utils.data"):
        handlers["SIGCHLD"] = signal.SIG_DFL
    return handlers


def _torch_state() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


STATE: dict[str, Callable[[], dict[str, Any]]] = {
    "environment": _environment,
    "the handlers of this process": _handlers,
    "torch": _torch_state,
}


def _restore(before: dict[str, dict[str, Any]]) -> None:
    """One test's leak is that test's failure only."""
    for name in _environment().keys() - before["environment"].keys():
        del os.environ[name]
    os.environ.update(before["environment"])
    handlers = before["the handlers of this process"]
    sys.excepthook = handlers["sys.excepthook"]
    for watched in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(watched, handlers[watched.name])
    torch.set_default_dtype(before["torch"]["default dtype"])
    torch.set_default_device(before["torch"]["default device"])
    torch.set_grad_enabled(before["torch"]["gradients"])
    torch.set_num_threads(before["torch"]["threads"])


def _threads() -> set[Any]:
    return {t for t in threading.enumerate() if not t.daemon}


def _children() -> set[int]:
    """Living child processes, except the pool's and Python's own. Empty where there is no /proc."""
    pids: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            pids.update(int(word) for word in file.read_text().split())
        except OSError:  # the thread has ended meanwhile
            continue
    return {pid for pid in pids - pool_pids() if not any(kept in _command(pid) for kept in KEPT_BY_PYTHON)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace") or "(a zombie)"
    except OSError:
        return "(gone)"


def _settled(look: Callable[[], set[Any]], before: set[Any]) -> list[Any]:
    """What is new, after giving it a second to end by itself."""
    deadline = time.monotonic() + 1
    while (new := look() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sorted(new, key=str)


def _difference(before: dict[str, Any], after: dict[str, Any] | str) -> str:
    if not isinstance(after, dict):
        return f"{before} -> {after}"
    names = sorted(before.keys() | after.keys())
    changed = [name for name in names if before.get(name) != after.get(name)]
    return ", ".join(f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in changed)
