# SPDX-License-Identifier: Apache-2.0
"""Telling loggers that the run is over, though nobody says so."""

import atexit
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from weakref import ref

from fabric.loggers.logger import Logger
from fabric.strategies.launchers import SubprocessLauncher


def finalize_at_exit(loggers: Sequence[Logger]) -> None:
    """Finalize those that are still there when Python ends.

    Call it after the launcher has installed its hooks, so that it comes before the other ranks are waited for.
    """
    if loggers:
        atexit.register(_finalize, [ref(logger) for logger in loggers])


@contextmanager
def saved_after(loggers: Sequence[Logger]) -> Iterator[None]:
    """Inside, a launched function runs. Afterwards its loggers are saved; where it failed, finalized."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            for logger in loggers:
                logger.finalize("failed")
        raise
    finally:
        for logger in loggers:  # a process that runs a function ends without Python's exit handlers
            logger.save()


def _finalize(loggers: Sequence[Callable[[], Logger | None]]) -> None:
    status = _status_at_exit()
    for get in loggers:
        if (logger := get()) is not None:
            logger.finalize(status)


class Ending:
    """Closes something once: when it is called, when `owner` is gone, or when this process ends.

    The end of a process is that of Python, or of the function of a process that `multiprocessing` started (which
    leaves out Python's exit handlers). Processes forked meanwhile have no part in it.

    Args:
        owner: Whose end is the last moment for closing; `close` must not refer to it.
        close: Called with how the run ended, `"success"` or `"failed"`.
    """

    def __init__(self, owner: object, close: Callable[[str], None]) -> None:
        self._close = close
        self._finalizer = Finalize(owner, _close_now, args=(close,), exitpriority=10)
        # Of Python's exit handlers the last comes first: so this one is before those of the client and the launcher.
        atexit.register(self._finalizer)

    @property
    def is_ahead(self) -> bool:
        """Whether it has not been closed yet."""
        return self._finalizer.still_active()

    def __call__(self, status: str) -> None:
        atexit.unregister(self._finalizer)
        if self.is_ahead:
            self._finalizer.cancel()
            self._close(status)


def _close_now(close: Callable[[str], None]) -> None:
    close(_status_at_exit())


def _status_at_exit() -> str:
    """Python keeps an exception that nobody caught; at a prompt it is one of an earlier line."""
    uncaught = hasattr(sys, "last_value") and not hasattr(sys, "ps1")
    return "failed" if uncaught or SubprocessLauncher.job_failed() else "success"
