# SPDX-License-Identifier: Apache-2.0
"""One place to wait at: for signals, for ranks that end, for what ranks say."""

import contextlib
import os
import select
import time
from collections import deque
from typing import NamedTuple

from fabric.processes.verdict import Ended, Failure

# One byte each through the pipe. Below 128: a signal that this process got, written by Python's wake-up descriptor.
_WAKE = 0
_FROM_RANK = 128
RECORDED = 255
IN_DEBUGGER = 254


class Signalled(NamedTuple):
    """This process got a signal."""

    signum: int


class Reported(NamedTuple):
    """A rank says that it got a signal, that this signal is for its debugger, or that it has left a record."""

    what: int


class Closing:
    """The script in this process came to its end."""


class Gone:
    """The process that started this one is gone."""


class Remote(NamedTuple):
    """A rank on another machine failed."""

    failure: Failure


class Elsewhere:
    """All other machines have come to their end as well."""


Event = Elsewhere | Signalled | Reported | Closing | Gone | Remote | Ended


def tell(descriptor: int, what: int) -> None:
    """A rank tells its launcher: a signal number, `IN_DEBUGGER` or `RECORDED`."""
    with contextlib.suppress(OSError):  # the launcher is gone, which the rank learns in another way
        os.write(descriptor, bytes([what if what >= IN_DEBUGGER else _FROM_RANK + what]))


class Mailbox:
    """Events of other threads, of signals and of other processes, in one queue that needs no polling.

    Args:
        death_fd: A pipe whose end of file says that the launcher is `Gone`.
    """

    def __init__(self, *, death_fd: int | None = None) -> None:
        self._death_fd = death_fd
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        self._posted: deque[Event] = deque()
        self._ready: deque[Event] = deque()

    def put(self, event: Event) -> None:
        """Add an event; from any thread."""
        self._posted.append(event)
        with contextlib.suppress(BlockingIOError):  # full, so the reader wakes anyway
            os.write(self.writer, bytes([_WAKE]))

    def get(self, until: float | None = None) -> Event | None:
        """Block until there is an event; None once the clock (`time.monotonic`) is at `until`."""
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        if self._death_fd is not None:
            poll.register(self._death_fd, select.POLLIN)
        while not self._ready:
            wait = None if until is None else max(0.0, until - time.monotonic())
            found = poll.poll(None if wait is None else wait * 1000 + 1)
            if not found:
                return None
            if self._death_fd is not None and self._death_fd in dict(found):
                self._death_fd = None
                return Gone()
            self._collect()
        return self._ready.popleft()

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)

    def _collect(self) -> None:
        # What was posted comes after what the ranks had told before that, so it is taken first.
        posted = [self._posted.popleft() for _ in range(len(self._posted))]
        content = b""
        with contextlib.suppress(BlockingIOError):
            content = os.read(self.reader, 4096)
        for byte in content:
            if byte >= _FROM_RANK:
                self._ready.append(Reported(byte if byte >= IN_DEBUGGER else byte - _FROM_RANK))
            elif byte != _WAKE:
                self._ready.append(Signalled(byte))
        self._ready.extend(posted)
