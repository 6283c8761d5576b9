# SPDX-License-Identifier: Apache-2.0
"""The rank's own side: what a process that Fabric started does so that it never outlives its launcher."""

import atexit
import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback as tracebacks
from collections.abc import Callable
from types import TracebackType

from fabric.processes.errors import record_of
from fabric.processes.forks import in_forked_children
from fabric.processes.mailbox import IN_DEBUGGER, RECORDED, Closing, Gone, Mailbox, Signalled, tell
from fabric.processes.main_thread import (
    ASKING,
    MainThread,
    RankFailed,
    interrupt_is_for_debugger,
    is_wake,
    leave_signals_to_main_thread,
)
from fabric.processes.record import Record, Records
from fabric.processes.screen import show
from fabric.processes.supervisor import FAILURE_GRACE, INTERRUPT_GRACE, WAKE_AFTER
from fabric.processes.token import LaunchToken

_PR_SET_PDEATHSIG = 1


class Rank:
    """This process, as a rank that Fabric started.

    It watches the launcher's death pipe, leaves a record when an exception leaves its script, and comes to its end
    together with the others. Process-wide it installs what `InsideSupervisor` does.

    Args:
        token: The rank's place in the job.
        leave: Leaves the process group, at the end.
        on_gone: Called when the launcher is gone, before this process ends (to tell other machines).
    """

    def __init__(
        self, token: LaunchToken, *, leave: Callable[[], None], on_gone: Callable[[], None] = lambda: None
    ) -> None:
        self._token = token
        self._leave = leave
        self._on_gone = on_gone
        self._records = Records(token.records)
        self._mailbox = Mailbox(death_fd=token.death_fd)
        # The first rank of a machine unwinds at SIGTERM, like a script that was started by hand; the others just end.
        self._is_first = token.local_rank == 0
        self._main = MainThread(self._mailbox.writer, ending="unwind" if self._is_first else "default")
        self._thread = threading.Thread(target=self._watch, name="fabric-rank", daemon=True)
        self._check_at: float | None = None
        self._interrupted_at = 0.0
        self._excepthook = sys.excepthook
        self._failed = False
        self._hooked = False
        # Kept to the end of the script, so that each side sees the other one end.
        self._port_fd = os.dup(token.port_fd) if token.port_fd is not None else None

    def install(self) -> None:
        """Begin to watch."""
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        self._hooked = True
        atexit.register(self.finish)
        in_forked_children(self._forget)
        self._main.install()
        if self._main.installed and os.getppid() == self._token.launcher_pid:
            _signal_at_parent_death()
        self._thread.start()
        _disarm(self._token.death_fd)

    def uninstall(self) -> None:
        """Take the hooks and handlers away; the watch for the launcher's end goes on."""
        self._hooked = False  # PyTorch's own hook may still call ours
        self._main.uninstall()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook

    def fail(self, error: BaseException) -> int:
        """Leave a record of an exception that nobody caught.

        Returns:
            The exit code: 1, or that of a signal which ended the others, whereupon this error came first.
        """
        self._failed = True
        self._main.quiet = True
        overtaken = self._main.take_error()
        code = int(overtaken.code or 1) if isinstance(overtaken, SystemExit) else 1
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted and self._is_first:  # at the terminal: that is no failure, but the end of the job
            self._tell_signal(signal.SIGINT)
            return code
        record = record_of(error, rank=self._token.rank, signal=signal.SIGINT if interrupted else 0)
        if record.felt:
            self._wait_if_launcher_gone()
        self._tell_record(record)
        return code

    def give_up(self) -> None:
        """End without leaving the group or waiting for anybody."""
        self._failed = True

    def _forget(self) -> None:
        self.uninstall()
        atexit.unregister(self.finish)

    # -- in the watching thread

    def _watch(self) -> None:
        leave_signals_to_main_thread()
        while True:
            match self._mailbox.get(self._check_at):
                case None:
                    self._check()
                case Gone():
                    self._end_without_launcher()
                case Signalled(signum):
                    self._on_signal(signum)
                case Closing():
                    return

    def _on_signal(self, signum: int) -> None:
        self._main.forward(signum)
        if is_wake(signum) or signum not in ASKING:
            return
        if signum == signal.SIGINT and interrupt_is_for_debugger():
            self._tell_signal(IN_DEBUGGER)
            return
        self._tell_signal(signum)
        self._check_at = time.monotonic() + WAKE_AFTER
        if signum == signal.SIGINT:
            self._interrupted_at = time.monotonic()

    def _check(self) -> None:
        """Some time after a signal: has it reached the script?"""
        self._check_at = None
        if not self._interrupted_at:
            self._main.wake()
            self._check_at = time.monotonic() + WAKE_AFTER if self._main.waits_to_raise else None
        elif self._main.ignores_interrupt(self._interrupted_at):
            # The others end first, which may free the first rank from a collective.
            end = self._interrupted_at + INTERRUPT_GRACE * (2 if self._is_first else 1)
            if time.monotonic() >= end:
                self._end_interrupted()
            self._main.wake()
            self._check_at = end

    def _end_interrupted(self) -> None:
        """Ctrl-C did not reach the script: the main thread is in a call that does not return."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        record = record_of(KeyboardInterrupt(), rank=self._token.rank, signal=signal.SIGINT)
        stack = "".join(tracebacks.format_stack(frame)) if frame is not None else ""
        self._tell_record(record._replace(traceback=f"{stack}{record.summary}\n"))
        os._exit(128 + signal.SIGINT)

    def _end_without_launcher(self) -> None:
        token = self._token
        time.sleep(0.01 * token.local_rank)  # the lowest of those that are left speaks
        if self._records.claim("gone"):
            show(
                f"\nfabric: {token.launcher} (pid {token.launcher_pid}) is gone."
                f" Rank {token.rank} (pid {os.getpid()}) and the other ranks of this machine end too.\n"
            )
            self._on_gone()
            self._records.remove()
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        self._main.raise_error(RankFailed("", 1))
        time.sleep(FAILURE_GRACE)
        os._exit(1)

    # -- in the main thread

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """The script failed. The launcher shows the record if it is the first; a hook of the user's runs too."""
        if not self._hooked:
            self._excepthook(kind, error, traceback)
            return
        code = self.fail(error)
        at_terminal = self._is_first and isinstance(error, KeyboardInterrupt)
        if at_terminal or self._excepthook is not sys.__excepthook__:
            self._excepthook(kind, error, traceback)
        if code != 1:
            raise SystemExit(code)

    def finish(self) -> None:
        """The script, or the function, came to its end."""
        self._main.quiet = True
        atexit.unregister(self.finish)
        if not self._failed:
            self._records.mark_end(self._token.rank)
            self._leave()
            self._part()
        self.uninstall()

    def _part(self) -> None:
        """The host of the store goes last: its end of the port pipe reports an error once the others closed theirs."""
        if self._port_fd is None:
            return
        if self._is_first and self._token.world_size > 1:
            poll = select.poll()
            poll.register(self._port_fd, 0)
            with contextlib.suppress(KeyboardInterrupt):  # of a handler of the user's
                poll.poll()
        os.close(self._port_fd)
        self._port_fd = None

    def _wait_if_launcher_gone(self) -> None:
        """An error that the launcher's own end may have caused: where it did, that is what is to be said."""
        if self._token.death_fd is None:
            return
        poll = select.poll()
        poll.register(self._token.death_fd, select.POLLIN)
        if poll.poll(100):
            threading.Event().wait(5 * FAILURE_GRACE)

    def _tell_record(self, record: Record) -> None:
        self._records.write(record)
        self._tell(RECORDED)

    def _tell_signal(self, what: int) -> None:
        if self._is_first:
            self._tell(what)

    def _tell(self, what: int) -> None:
        if self._token.control_fd is not None:
            tell(self._token.control_fd, what)


def _signal_at_parent_death() -> None:
    """Where a forgotten copy of the death pipe's write end hides the launcher's end, a signal still tells it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGURG)


def _disarm(death_fd: int | None) -> None:
    """From here on this process watches the pipe itself; until now the kernel would have ended it (`start.arm`)."""
    if sys.platform == "linux" and death_fd is not None:
        import fcntl

        fcntl.fcntl(death_fd, fcntl.F_SETFL, fcntl.fcntl(death_fd, fcntl.F_GETFL) & ~os.O_ASYNC)
