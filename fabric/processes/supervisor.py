# SPDX-License-Identifier: Apache-2.0
"""Watches the ranks of one machine: all live and die together."""

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from fabric.processes.child import Child
from fabric.processes.mailbox import RECORDED, Closing, Elsewhere, Event, Mailbox, Remote, Reported, Signalled
from fabric.processes.main_thread import leave_signals_to_main_thread
from fabric.processes.record import Record, Records
from fabric.processes.verdict import Ended, Failure, Sight, first_failure

# Seconds that the other ranks, and rank 0's own `finally`, have after a failure.
FAILURE_GRACE = 1.0
# Seconds after Ctrl-C within which a rank's main thread has to be back in Python.
INTERRUPT_GRACE = 2.0
# Seconds after which a main thread that sleeps through a signal is woken.
WAKE_AFTER = 0.3


def read_grace(environ: Mapping[str, str]) -> float:
    """Seconds that a job has to end by itself after a signal from outside (`FABRIC_GRACE`, 30).

    Raises:
        ValueError: `FABRIC_GRACE` is no number of seconds.
    """
    text = environ.get("FABRIC_GRACE", "30")
    try:
        grace = float(text)
    except ValueError:
        grace = -1.0
    if not 0 <= grace < float("inf"):
        raise ValueError(
            f"`FABRIC_GRACE={text}` is not a number of seconds."
            " Give the time that a job has to end after a signal from outside: `FABRIC_GRACE=30`."
        )
    return grace


class Supervisor(ABC):
    """Waits, in one thread per child, for the ranks of this machine, and ends them together.

    Args:
        children: The processes to watch.
        mailbox: Where everything that happens arrives.
        records: Where failing ranks leave their records.
        grace: Seconds that the job has to end by itself after a signal from outside.
        waits_for_closing: Whether rank 0 runs in this process, so that the watch goes on until its script has ended.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        mailbox: Mailbox,
        records: Records,
        grace: float,
        waits_for_closing: bool = False,
    ) -> None:
        self.mailbox = mailbox
        self.records = records
        self.running = {child.rank: child for child in children}
        self.ended: list[Ended] = []
        self.asked = 0
        self.asked_at = 0.0
        self.forced = False
        self.other_machines = False
        self.check_at: float | None = None
        self._own: dict[int, Record] = {}
        self._remote: Failure | None = None
        self._grace = grace
        self._deadline: float | None = None
        self._open = waits_for_closing
        self._threads = [
            threading.Thread(target=self._wait, args=(child,), name=f"fabric-rank-{child.rank}", daemon=True)
            for child in children
        ]

    def start(self) -> None:
        """Begin to wait for the children."""
        for thread in self._threads:
            thread.start()

    def watch(self) -> Failure | None:
        """Block until all have ended, or there is a reason to end the rest; returns the failure, where it is one."""
        while True:
            verdict = self.verdict()
            if isinstance(verdict, Failure):
                return verdict
            if self.forced or (verdict is None and not self.running and self._is_closed and self._ended_here()):
                return None
            open_until = None if verdict is None else verdict - time.time() + time.monotonic()
            times = [at for at in (open_until, self._deadline, self.check_at) if at is not None]
            event = self.mailbox.get(min(times, default=None))
            if event is not None:
                self._handle(event)
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                return None
            elif self.check_at is not None and time.monotonic() >= self.check_at:
                self.check_at = None
                self._on_check()

    @property
    def _is_closed(self) -> bool:
        """Whether no script runs in this process: it came to its end, or an exception has left it."""
        return not self._open or bool(self._own)

    def verdict(self) -> Failure | float | None:
        """Who failed first, as far as that is known."""
        if self._remote is not None:
            return self._remote
        running = {-1, *self.running} if self.other_machines else set(self.running)
        records = {**self.records.read(), **self._own}
        return first_failure(Sight(self.ended, records, self.records.ends(), running, time.time(), self.asked))

    def add_own(self, record: Record) -> None:
        """Add the record of a rank that runs in this process; from any thread."""
        self._own[record.rank] = record
        self.mailbox.put(Reported(RECORDED))

    def ask_to_end(self, signum: int, *, spare: int | None = None) -> None:
        """Pass a signal on to the ranks (but `spare`); from now on the job has the time of grace to end by itself."""
        if self.asked:
            return
        self.asked = signum
        self.asked_at = time.monotonic()
        self._deadline = self.asked_at + self._grace
        for child in list(self.running.values()):
            if child.rank != spare:
                child.send(signum)

    def end(self) -> None:
        """End the ranks that still run: SIGTERM, then, a second later, SIGKILL, with all that they started."""
        for child in self.running.values():
            child.send(signal.SIGTERM, group=True)
        self._drain(time.monotonic() + FAILURE_GRACE)
        for child in self.running.values():
            child.send(signal.SIGKILL, group=True)
        self._drain(time.monotonic() + 10 * FAILURE_GRACE)

    def _drain(self, until: float) -> None:
        while self.running:
            event = self.mailbox.get(until)
            if event is None:
                return
            if isinstance(event, (Ended, Closing)):
                self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Ended():
                self.running.pop(event.rank, None)
                self.ended.append(event)
            case Signalled():
                self._on_signal(event.signum)
            case Reported():
                self._on_report(event.what)
            case Remote():
                self._remote = event.failure
            case Closing():
                self._open = False
            case Elsewhere():
                self.other_machines = False

    def _ended_here(self) -> bool:
        """No rank of this machine runs any more; whether that is the end of the watch."""
        return True

    @abstractmethod
    def _on_signal(self, signum: int) -> None:
        """This process got a signal; where the job shall end for it, this calls `ask_to_end`."""

    def _on_report(self, what: int) -> None:
        """A rank in a process that we started told something. A record is read by `verdict` in any case."""

    def _on_check(self) -> None:
        """The clock is at `check_at`."""

    def _wait(self, child: Child) -> None:
        leave_signals_to_main_thread()
        pid = os.getpid()
        ended = child.wait()
        if os.getpid() == pid:
            self.mailbox.put(ended)
