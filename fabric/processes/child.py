# SPDX-License-Identifier: Apache-2.0
"""The process of one rank, seen from its launcher."""

import contextlib
import os
import signal
import time
from collections.abc import Callable

from fabric.processes.verdict import Ended


class Child:
    """The process of one rank.

    Args:
        rank: Global rank.
        pid: The process.
        join: Blocks until it has ended and returns its exit code, -n for signal n.
        leads_session: Whether it leads a session of its own, so that it ends together with what it has started.
    """

    def __init__(self, rank: int, pid: int, *, join: Callable[[], int], leads_session: bool = True) -> None:
        self.rank = rank
        self.pid = pid
        self._join = join
        self._leads_session = leads_session

    def wait(self) -> Ended:
        """Block until the process has ended. What a failed rank leaves running (data workers) is ended with it."""
        failed = _wait_unreaped(self.pid)
        if failed:
            self.send(signal.SIGKILL, group=True)
        code = self._join()
        if failed is None and code:
            self.send(signal.SIGKILL, group=True)
        return Ended(self.rank, self.pid, code, time.time())

    def send(self, signum: int, *, group: bool = False) -> None:
        """Send a signal, to the process or to all of its group."""
        try:
            if group and self._leads_session:
                os.killpg(self.pid, signum)
                return
        except OSError:  # it has not come to lead a session yet, or nothing is left of it
            pass
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)


def _wait_unreaped(pid: int) -> bool | None:
    """Block until the process ends and say whether it failed; it stays a zombie, whose number nobody can reuse.

    None where the system cannot do that.
    """
    if not hasattr(os, "waitid"):
        return None
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    return status is not None and (status.si_code != os.CLD_EXITED or status.si_status != 0)
