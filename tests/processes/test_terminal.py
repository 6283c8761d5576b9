# SPDX-License-Identifier: Apache-2.0
"""Rank 0 stays the user's process: its terminal, its debugger, its Ctrl-C."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes.jobs import script
from tests.processes.test_supervision import ROOT, START

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="uses a pseudo-terminal")]


class Terminal:
    """A job in the foreground of a terminal of its own."""

    def __init__(self, *words: str, folder: Path) -> None:
        self.shown = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execve(words[0], words, {**os.environ, "PYTHONPATH": ROOT, "PYTHON_COLORS": "0", "TERM": "dumb"})

    def type(self, text: str) -> None:
        """What a person types; `\\x03` is Ctrl-C."""
        os.write(self._fd, text.encode())

    def read_until(self, text: str, bound: float = 30.0) -> str:
        """What has been shown, once `text` is part of what is new."""
        start, end = len(self.shown), time.monotonic() + bound
        while text.encode() not in self.shown[start:]:
            ready = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))[0]
            if not ready or not self._read():
                raise AssertionError(f"`{text}` is not shown:\n{self.shown.decode()}")
        return self.shown[start:].decode()

    def wait(self) -> int:
        """The exit code."""
        end = time.monotonic() + 30
        while select.select([self._fd], [], [], max(0.0, end - time.monotonic()))[0] and self._read():
            pass
        assert time.monotonic() < end, f"does not end:\n{self.shown.decode()}"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self) -> bool:
        try:
            content = os.read(self._fd, 4096)
        except OSError:  # the last process has closed it
            return False
        self.shown += content
        return bool(content)


Open = Callable[[tuple[str, ...], str], Terminal]
DEBUGGED = """
if launch() == 0:
    wait_for("ready-1")
    breakpoint()
    for _ in range(300):
        time.sleep(0.1)
else:
    breakpoint()  # goes on
    say("ready-1")
    time.sleep(30)
"""
TYPED = """
if launch() == 0:
    wait_for("ready-1")
    print("typed:", input(), flush=True)
    try:
        time.sleep(30)
    finally:
        print("finally", flush=True)
else:
    say("ready-1")
    time.sleep(30)
"""
FABRIC_RUN = ("-m", "fabric.cli", "run", "--devices", "2")
PDB = ("-m", "pdb", "-c", "continue")


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Open]:
    terminals: list[Terminal] = []

    def open_terminal(words: tuple[str, ...], text: str) -> Terminal:
        path = script(tmp_path, START + text)
        terminals.append(Terminal(sys.executable, *words, path, folder=tmp_path))
        return terminals[0]

    yield open_terminal
    for terminal in terminals:
        terminal.close()


@pytest.mark.parametrize("words", [(), PDB, FABRIC_RUN], ids=["python", "pdb", "fabric run"])
def test_a_debugger_in_rank_0(open_terminal: Open, words: tuple[str, ...]) -> None:
    terminal = open_terminal(words, DEBUGGED)
    terminal.read_until("(Pdb) ")
    terminal.type("p 6 * 7\n")
    terminal.read_until("42\r\n(Pdb) ")
    time.sleep(0.3)  # until it reads
    terminal.type("\x03")  # clears the prompt, and ends nobody
    terminal.read_until("(Pdb) ")
    time.sleep(1.5)
    terminal.type("p 6 * 9\n")
    terminal.read_until("54\r\n(Pdb) ")
    terminal.type("continue\n")
    time.sleep(0.3)
    terminal.type("\x03")  # stops the program, in the debugger
    terminal.read_until("(Pdb) ")
    time.sleep(1.5)
    terminal.type("p 7 * 9\n")
    terminal.read_until("63\r\n(Pdb) ")


@pytest.mark.parametrize("words", [(), FABRIC_RUN], ids=["python", "fabric run"])
def test_the_keyboard_is_rank_0s(open_terminal: Open, words: tuple[str, ...]) -> None:
    terminal = open_terminal(words, TYPED)
    terminal.type("hello\n")
    terminal.read_until("typed: hello")
    time.sleep(0.3)
    terminal.type("\x03")
    terminal.read_until("finally")
    assert terminal.wait() == 130
    assert terminal.shown.decode().strip().endswith("got SIGINT (signal 2). All ranks have ended.")


def test_the_starter_answers_where_rank_0_does_not(tmp_path: Path) -> None:
    """SIGINT to `fabric run` alone, not to the terminal's group."""
    path = script(tmp_path, START + "say(f'ready-{launch()}')\ntime.sleep(30)\n")
    words = (sys.executable, "-m", "fabric.cli", "run", "--devices", "2", path)
    with subprocess.Popen(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}, stderr=subprocess.PIPE) as job:
        while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        job.send_signal(signal.SIGINT)
        _, shown = job.communicate(timeout=30)
    assert job.returncode == 130
    assert shown.decode().strip().endswith("got SIGINT (signal 2). All ranks have ended.")
