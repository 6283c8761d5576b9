# SPDX-License-Identifier: Apache-2.0
"""On a real terminal (a pseudo-terminal)."""

import contextlib
import os
import re
import sys
import threading

import pytest
import torch

from fabric import Fabric
from fabric.watching.displays import Lines, RichDisplay, Screen, TqdmDisplay

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")


class _Terminal:
    """Takes the place of stderr and stdout, and keeps what is written."""

    def __init__(self):
        import fcntl
        import struct
        import termios

        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.file = open(slave, "w")  # noqa: SIM115
        self._parts = []
        self._patch = pytest.MonkeyPatch()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def take(self, *names):
        """Inside of the test: pytest puts its own files there before."""
        for name in names or ("stderr", "stdout"):
            self._patch.setattr(sys, name, self.file)

    def _read(self):
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(self._master, 4096):
                self._parts.append(part)

    def close(self):
        """What was written."""
        self._patch.undo()
        self.file.close()
        self._reader.join()
        os.close(self._master)
        return b"".join(self._parts).decode().replace("\r\n", "\n")


@pytest.fixture
def terminal(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    yield terminal
    if not terminal.file.closed:
        terminal.close()


def _epochs(fabric, kind, leave=None):
    for epoch in fabric.progress(range(2), description="epochs", display=kind):
        bar = fabric.progress(range(3), description="inner [x]", display=kind, unit="step")
        bar._display.interval = 0.0
        for i in bar:
            bar.show(loss=torch.tensor(0.25))
            if (epoch, i) == (0, 1):
                fabric.print("a line of text")
            if leave is not None and epoch == 1:
                leave()


def _stop():
    raise ValueError("mine")


@pytest.mark.parametrize("kind", ["rich", "tqdm"])
@pytest.mark.parametrize("leave", [None, _stop])
def test_nested_bars(terminal, kind, leave) -> None:
    pytest.importorskip(kind)
    terminal.take()
    fabric = Fabric(accelerator="cpu")
    with pytest.raises(ValueError, match=r"^mine$") if leave else contextlib.nullcontext():
        _epochs(fabric, kind, leave)
    assert sys.stdout is terminal.file
    assert sys.stderr is terminal.file
    text = terminal.close()
    assert "inner [x] " in text
    assert "step/s  loss 0.25" in text
    assert "a line of text\n" in text
    *_, last = re.sub(r"\x1b\[\?25[hl]|\x1b\[2K|\x1b\[[0-9;]*m", "", text).replace("\r", "\n").split("\n")[:-1]
    assert last.startswith("epochs ")  # the outer bar stays, and the line is ended
    assert ("1/2" if leave else "2/2") in last
    if kind == "rich":
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back
    assert fabric._screen._rich is None
    assert fabric._screen._tqdm == []


def test_no_thread_draws(terminal) -> None:
    terminal.take()
    for kind in ("rich", "tqdm"):
        pytest.importorskip(kind)
        before = threading.active_count()
        for _ in Fabric(accelerator="cpu").progress(range(2), display=kind):
            assert threading.active_count() == before


def test_rich_is_first_choice_on_a_terminal(terminal, monkeypatch) -> None:
    pytest.importorskip("rich")
    terminal.take()
    assert type(Screen().display("auto")) is RichDisplay
    monkeypatch.setenv("TERM", "dumb")
    assert type(Screen().display("auto")) is Lines


def test_bars_that_end_in_another_order(terminal) -> None:
    pytest.importorskip("rich")
    terminal.take()
    fabric = Fabric(accelerator="cpu")
    first = iter(fabric.progress(range(3), description="first", display="rich"))
    second = iter(fabric.progress(range(3), description="second", display="rich"))
    next(first)
    next(second)
    first.close()
    assert list(second) == [1, 2]
    assert fabric._screen._rich is None
    assert terminal.close().count("\x1b[?25h") == 1


def test_stdout_that_goes_elsewhere_still_goes_there(terminal, monkeypatch, tmp_path) -> None:
    pytest.importorskip("rich")
    terminal.take("stderr")
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        fabric = Fabric(accelerator="cpu")
        for _ in fabric.progress(range(1), display="rich"):
            fabric.print("a result")
    assert (tmp_path / "out").read_text() == "a result\n"
    assert "a result" not in terminal.close()


@pytest.mark.parametrize("total", [None, 5])
def test_tqdm_on_a_terminal_that_does_not_tell_its_size(terminal, total) -> None:
    pytest.importorskip("tqdm")
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal.file.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    terminal.take()
    bar = Fabric(accelerator="cpu").progress((x for x in range(5)), total=total, display="tqdm")
    assert type(bar._display) is TqdmDisplay
    list(bar)
    assert ("5/5" if total else "5, ") in terminal.close()
