# SPDX-License-Identifier: Apache-2.0
"""Whole jobs for tests: a script, the processes that come from it, and what they leave."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

_MARK = "FABRIC_TEST_JOB"
_START = 180.0
_BOUND = 30.0
_CLUSTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "FABRIC_GRACE")


class Job:
    """A command and all processes that it starts, in a process group of its own, as a shell would start it.

    Args:
        words: The command.
        folder: Its directory; `said` reads the files that its ranks leave there.
        environ: Variables beyond this process's own; an empty one is taken away.
        bound: Seconds that a busy machine may take to start it.
    """

    def __init__(self, *words: str, folder: Path, environ: dict[str, str] | None = None, bound: float = _START) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._end = time.monotonic() + bound
        inherited = {name: value for name, value in os.environ.items() if name not in _CLUSTER}
        variables = {**inherited, "OMP_NUM_THREADS": "1", **(environ or {}), _MARK: self._mark}
        variables = {name: value for name, value in variables.items() if value}
        self._out = (folder / "stdout.txt").open("wb")
        self._err = (folder / "stderr.txt").open("wb")
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send_to_group(self, signum: int) -> None:
        """Ctrl-C at the terminal of this job does this with SIGINT."""
        os.killpg(self.process.pid, signum)

    def wait(self) -> int:
        """The exit code, once no process of the job is left, which must be soon."""
        self._end = time.monotonic() + _BOUND
        try:
            self.until(lambda: self.process.poll() is not None, "the command to end")
            self.until(lambda: not self.living(), "all processes of the job to end")
        finally:
            self.close()
        return int(self.process.returncode)

    def close(self) -> None:
        """End whatever is left."""
        for pid in (*self.living(), self.process.pid):
            if self.process.poll() is None or pid != self.process.pid:
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._out.close()
        self._err.close()

    def living(self) -> list[int]:
        """The processes of this job that run, whoever their parent is by now."""
        mark = f"{_MARK}={self._mark}".encode()
        return [pid for pid in _pids() if _is_running(pid) and mark in _read(pid, "environ").split(b"\0")]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that must happen in time."""
        while not condition():
            if time.monotonic() > self._end:
                self.close()
                raise AssertionError(f"timed out waiting for {what}\n{self.stdout}\n{self.stderr}")
            time.sleep(0.01)

    def said(self, name: str) -> str:
        """What a rank wrote into the file `name`, once it is there."""
        path = self.folder / name
        self.until(lambda: path.exists() and path.read_text() != "", f"`{name}`")
        return path.read_text()

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout.txt").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text()

    @property
    def last_line(self) -> str:
        return (self.stderr.strip().splitlines() or [""])[-1]


def script(folder: Path, text: str, name: str = "main.py") -> str:
    """Write a script and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def python(*words: str, folder: Path, environ: dict[str, str] | None = None) -> Job:
    """A job started by `python ...`."""
    return Job(sys.executable, *words, folder=folder, environ=environ)


def fabric_run(*words: str, folder: Path, environ: dict[str, str] | None = None) -> Job:
    """A job started by `fabric run ...`."""
    return Job(sys.executable, "-m", "fabric.cli", "run", *words, folder=folder, environ=environ)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _is_running(pid: int) -> bool:
    stat = _read(pid, "stat").rpartition(b")")[2].split()
    return bool(stat) and stat[0] not in (b"Z", b"X")
