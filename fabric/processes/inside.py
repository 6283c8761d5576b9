# SPDX-License-Identifier: Apache-2.0
"""Supervision from inside: rank 0 is the user's own process, and watches the ranks that it has started."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from fabric.processes.child import Child
from fabric.processes.errors import record_of
from fabric.processes.forks import in_forked_children
from fabric.processes.mailbox import Closing, Mailbox, Reported
from fabric.processes.main_thread import (
    ASKING,
    MainThread,
    RankFailed,
    interrupt_is_for_debugger,
    leave_signals_to_main_thread,
)
from fabric.processes.record import Records, host_name
from fabric.processes.screen import error_stream, show
from fabric.processes.supervisor import FAILURE_GRACE, INTERRUPT_GRACE, WAKE_AFTER, Supervisor
from fabric.processes.verdict import Failure, person, signal_report


class OtherMachines(Protocol):
    """What supervision needs of the other machines of a job. Their news arrives in the mailbox."""

    def start(self) -> None:
        """Begin to wait for news."""

    def leave(self) -> None:
        """This machine has come to its end."""

    def settle(self, failure: Failure) -> Failure:
        """Tell them of a failure; returns the one that counts for the whole job."""

    def close(self) -> None:
        """The job has ended, well or not."""


class InsideSupervisor(Supervisor):
    """Supervises from a thread of rank 0's process.

    The only process-wide things it installs: `sys.excepthook`, an `atexit` callback, a wake-up descriptor for signals,
    a handler for SIGURG, and handlers for SIGINT, SIGTERM and SIGHUP where the user has none (Ctrl-C still raises
    `KeyboardInterrupt`). `uninstall` takes them away.

    Args:
        rank: This process's global rank.
        children: The other ranks of this machine.
        mailbox: Where everything that happens arrives.
        records: Where failing ranks leave their records.
        grace: Seconds that the job has to end by itself after a signal from outside.
        leave: Leaves the process group, at the end.
        machines: The tie to the other machines, where there are any.
    """

    def __init__(
        self,
        rank: int,
        children: Sequence[Child],
        *,
        mailbox: Mailbox,
        records: Records,
        grace: float,
        leave: Callable[[], None],
        machines: "OtherMachines | None" = None,
    ) -> None:
        super().__init__(children, mailbox=mailbox, records=records, grace=grace, waits_for_closing=True)
        self._rank = rank
        self._leave = leave
        self._machines = machines
        self.other_machines = machines is not None
        self._has_left = False
        self._main = MainThread(mailbox.writer, ending="unwind")
        self._thread = threading.Thread(target=self._supervise, name="fabric-supervisor", daemon=True)
        self._interrupted_at = 0.0
        self._has_unwound = False  # by KeyboardInterrupt
        self._decided = threading.Event()  # nothing of this machine's other ranks is left; `_failure` is known
        self._unwound = threading.Event()  # rank 0's script, and what it registered with `atexit`, are done
        self._failure: Failure | None = None
        self._raised: RankFailed | None = None
        self._error: BaseException | None = None
        self._excepthook = sys.excepthook
        self._last_value = getattr(sys, "last_value", None)
        self._code_given = False
        self._hooked = False

    def install(self) -> None:
        """Begin to supervise. Only in the main thread can signals be handled."""
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        self._hooked = True
        atexit.register(self._at_exit)
        in_forked_children(self._forget)
        self._main.install()
        self.start()
        self._thread.start()
        if self._machines is not None:
            self._machines.start()

    def uninstall(self) -> None:
        """Take the hooks and handlers away. Ranks that still run are waited for at the end of the process."""
        self._hooked = False  # PyTorch's own hook may still call ours
        self._main.uninstall()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook

    def _forget(self) -> None:
        self.uninstall()
        atexit.unregister(self._at_exit)

    # -- in the supervising thread

    def _on_signal(self, signum: int) -> None:
        self._main.forward(signum)
        if signum in ASKING and signum != signal.SIGINT:
            self.ask_to_end(signum)
            self.check_at = time.monotonic() + WAKE_AFTER
        elif signum == signal.SIGINT and self.asked:
            self.forced = True
        elif signum == signal.SIGINT and not interrupt_is_for_debugger():
            self.ask_to_end(signum)
            self._interrupted_at = time.monotonic()
            self.check_at = self._interrupted_at + WAKE_AFTER

    def _on_report(self, what: int) -> None:
        if what == signal.SIGINT:  # KeyboardInterrupt has left rank 0's script
            self.ask_to_end(what)
            self._has_unwound = True
            self.check_at = time.monotonic() + FAILURE_GRACE

    def _on_check(self) -> None:
        in_grace = time.monotonic() < self._interrupted_at + INTERRUPT_GRACE
        if self._has_unwound:
            self.forced = True
        elif self.asked != signal.SIGINT:
            self._main.wake()
            self.check_at = time.monotonic() + WAKE_AFTER if self._main.waits_to_raise else None
        elif self._main.ignores_interrupt(self._interrupted_at):
            # Where the main thread is in a collective, only the end of the others ends it.
            self.forced = not in_grace
            self.check_at = self._interrupted_at + INTERRUPT_GRACE
            self._main.wake()

    def _ended_here(self) -> bool:
        if not self.other_machines or self._machines is None or self._ended_by_signal():
            return True
        if not self._has_left:
            self._has_left = True
            self._machines.leave()
        return False

    def _ended_by_signal(self) -> bool:
        return bool(self.asked) and (self._main.unwound or any(ended.code for ended in self.ended))

    def _supervise(self) -> None:
        leave_signals_to_main_thread()
        failure = self.watch()
        finished = not (failure or self._open or self.running)
        self.end()
        self._failure = self._settle(failure)
        self._decided.set()
        own_error = self._error is not None and (self._failure is None or self._failure.rank == self._rank)
        if not finished and not own_error:
            self._end_script()

    def _settle(self, failure: Failure | None) -> Failure | None:
        """What counts for the whole job, where other machines are part of it."""
        if self._machines is None:
            return failure
        if failure is not None:
            return self._machines.settle(failure)
        if self.asked and self.other_machines:
            how = f"{signal.Signals(self.asked).name} from outside"
            self._machines.settle(Failure(self._rank, host_name(), os.getpid(), 128 + self.asked, how))
        return None

    def _end_script(self) -> None:
        """Let rank 0's script unwind; where it does not within the grace time, end the process."""
        code = self._failure.code if self._failure is not None else 128 + self.asked
        if not self._main.ignores_interrupt(self._interrupted_at):  # else KeyboardInterrupt is on its way
            self._raised = RankFailed(self._report(), code)
            self._main.raise_error(self._raised)
        if not self._unwound.wait(FAILURE_GRACE):
            self._exit_now(code)

    def _exit_now(self, code: int) -> None:
        show(self._report())
        self.records.remove()
        os._exit(code)

    def _report(self) -> str:
        if self._failure is not None:
            return self._failure.report()
        return signal_report(self.asked, who=person(self._rank, os.getpid()))

    # -- in the main thread

    @property
    def failed(self) -> bool:
        """Whether it is known by now that a rank has failed, or that a signal from outside ends the job."""
        return self._failure is not None or bool(self.asked)

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Rank 0's script failed: end the others. Who failed first is reported at exit."""
        if not self._hooked:
            self._excepthook(kind, error, traceback)
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        self._fail(error)
        counts = self._failure is None or self._failure.rank == self._rank
        if counts and (interrupted or self._excepthook is not sys.__excepthook__):
            with contextlib.redirect_stderr(error_stream()):
                self._excepthook(kind, error, traceback)
        self._code_given = True
        raise SystemExit(self._failure.code if self._failure is not None else 128 + self.asked)

    def _fail(self, error: BaseException) -> None:
        """Wait until the supervising thread knows who failed first, and has ended the others."""
        self._main.quiet = True
        if not self._decided.is_set():
            self._error = error
            if isinstance(error, KeyboardInterrupt):
                self.mailbox.put(Reported(signal.SIGINT))
            else:
                self.add_own(record_of(error, rank=self._rank))
        self._wait_decided()

    def _finish(self) -> None:
        """Leave the group and wait for the others."""
        self.records.mark_end(self._rank)
        if not self.asked:
            self._leave()
        self.mailbox.put(Closing())
        self._wait_decided()

    def _wait_decided(self) -> None:
        while not self._decided.is_set():
            with contextlib.suppress(KeyboardInterrupt):  # of a handler of the user's
                self._decided.wait()

    def _at_exit(self) -> None:
        """The script came to its end, one way or the other: wait for the other ranks, and say who failed."""
        self._main.quiet = True
        missed = getattr(sys, "last_value", None)  # somebody replaced our `sys.excepthook`
        if not self._decided.is_set() and missed is not None and missed is not self._last_value:
            self._fail(missed)
        elif not self._decided.is_set():
            self._finish()
        self._unwound.set()
        self.uninstall()
        if self._machines is not None:
            self._machines.close()
        if self._failure is not None or any(ended.code for ended in self.ended):
            show(self._report())
        self.records.remove()
        surfaced = self._code_given or (self._raised is not None and self._raised.surfaced)
        if self._failure is not None and not surfaced:
            os._exit(self._failure.code)
