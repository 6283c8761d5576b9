# SPDX-License-Identifier: Apache-2.0
"""Supervision from outside: this process only starts the ranks and watches them (`fabric run`, `ddp_spawn`)."""

import os
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from fabric.processes.child import Child
from fabric.processes.mailbox import IN_DEBUGGER, RECORDED, Mailbox
from fabric.processes.main_thread import ASKING, NOTICES, MainThread
from fabric.processes.record import Records
from fabric.processes.supervisor import Supervisor
from fabric.processes.verdict import Failure, person, signal_report

# Seconds within which rank 0, at the same terminal, says that it got Ctrl-C.
_ANSWER = 1.0


class Outcome(NamedTuple):
    """How a job ended.

    Args:
        failure: The first failure; None where no rank failed.
        asked: The signal from outside with which the job was asked to end; 0 for none.
        asked_who: Who got it.
        code: What the job exits with.
    """

    failure: Failure | None
    asked: int
    asked_who: str
    code: int

    def report(self) -> str:
        """The text that stands last on the screen; empty where all is well."""
        if self.failure is not None:
            return self.failure.report()
        return signal_report(self.asked, who=self.asked_who) if self.asked and self.code else ""


class OutsideSupervisor(Supervisor):
    """Supervises in the main thread of a process that is no rank.

    Args:
        children: All ranks of this machine, rank 0 of the machine first.
        mailbox: Where everything that happens arrives.
        records: Where failing ranks leave their records.
        grace: Seconds that the job has to end by itself after a signal from outside.
        shares_terminal: Whether the first rank is in this process's group, so that Ctrl-C reaches it anyway.
    """

    def __init__(
        self, children: Sequence[Child], *, mailbox: Mailbox, records: Records, grace: float, shares_terminal: bool
    ) -> None:
        super().__init__(children, mailbox=mailbox, records=records, grace=grace)
        self._first = children[0].rank
        self._first_pid = children[0].pid
        self._asked_who = f"process {os.getpid()}, which watches the ranks,"
        self._shares_terminal = shares_terminal
        self._main = MainThread(mailbox.writer, ending="only_tell")

    def run(self) -> Outcome:
        """Block until no rank is left."""
        self._main.install()
        try:
            self.start()
            failure = self.watch()
            self.end()
        finally:
            self._main.uninstall()
            self.records.remove()
        first = next((ended.code for ended in self.ended if ended.rank == self._first), -signal.SIGKILL)
        code = failure.code if failure is not None else first if first >= 0 else 128 - first
        return Outcome(failure, self.asked, self._asked_who, code)

    def forget(self) -> None:
        """In a forked child: its signals are its own."""
        self._main.uninstall()

    def _on_signal(self, signum: int) -> None:
        self._main.forward(signum)
        if signum in NOTICES:
            for child in list(self.running.values()):
                child.send(signum)
        if signum not in ASKING:
            return
        if signum == signal.SIGINT and self.asked:
            # Rank 0, at the same terminal, may have told of this very Ctrl-C before it arrived here.
            self.forced = not self._shares_terminal or time.monotonic() > self.asked_at + _ANSWER
        elif signum == signal.SIGINT and self._shares_terminal and self._first in self.running:
            self.check_at = time.monotonic() + _ANSWER
        else:
            self.ask_to_end(signum)

    def _on_report(self, what: int) -> None:
        if what == RECORDED:
            return
        self.check_at = None
        if what != IN_DEBUGGER:
            self._asked_who = person(self._first, self._first_pid)
            self.ask_to_end(what, spare=self._first)

    def _on_check(self) -> None:
        self.ask_to_end(signal.SIGINT)
