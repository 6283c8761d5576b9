# SPDX-License-Identifier: Apache-2.0
"""Signals of this process, and a way to raise in its main thread."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

# Nobody else uses it, and a process without our handler ignores it.
_WAKE = getattr(signal, "SIGURG", 0)
ASKING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# With this one schedulers announce that a job's time is up soon.
NOTICES = tuple(getattr(signal, name) for name in ("SIGUSR1",) if hasattr(signal, name))

# Seconds between a signal and what it does, at most, where nothing holds it up.
_CLOSE = 0.5
# Seconds that a `finally` or `except` of the script that already runs is left alone.
_PATIENCE = 0.7


class RankFailed(SystemExit):
    """Raised in the main thread of rank 0 when another rank has failed. `code` is that rank's exit code.

    Args:
        report: The text that stands last on the screen.
        code: Exit code of the job.
    """

    def __init__(self, report: str, code: int) -> None:
        super().__init__(report)
        self.surfaced = False
        self._code = code

    # The interpreter asks for it when the exception has left the script.
    @property
    def code(self) -> int:  # type: ignore[override]
        self.surfaced = True
        return self._code


class MainThread:
    """The signals of this process: each is written to a pipe at once, even while the main thread is in a collective.

    `quiet` stops it from raising in the main thread, once that is past the user's script.

    Args:
        writer: Write end of the pipe, which does not block.
        ending: What signals that ask a process to end do here. "unwind": SIGTERM and SIGHUP, where the user has no
            handler for them, raise `SystemExit` in the main thread, so that `finally` and `atexit` run. "only_tell":
            they, SIGINT, and SIGUSR1 where it has no handler, are only written to the pipe. "default": what they do
            anyway. Unless it is only told, SIGINT still raises `KeyboardInterrupt`; the handler also notes that it was
            called.
    """

    def __init__(self, writer: int, *, ending: Literal["unwind", "only_tell", "default"]) -> None:
        self._writer = writer
        self._ending = ending
        self._handlers: dict[int, Any] = {}
        self._old_writer = -1
        self._error: BaseException | None = None
        self._patient_until = 0.0
        self._interrupted_at = 0.0
        self.installed = False
        self.quiet = False
        self.unwound = False  # by SIGTERM or SIGHUP

    def install(self) -> None:
        """Take the signals. Only the main thread can; elsewhere this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._old_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handle(_WAKE, self._on_wake)
        for signum in ASKING:
            before = signal.getsignal(signum)
            if self._ending != "only_tell" and before is signal.default_int_handler:
                self._handle(signum, self._on_interrupt)
            elif self._ending == "unwind" and before is signal.SIG_DFL:
                self._handle(signum, self._on_end)
            elif self._ending == "only_tell" and before not in (signal.SIG_IGN, None):
                self._handle(signum, self._on_told)
        for signum in NOTICES:
            if self._ending == "only_tell" and signal.getsignal(signum) is signal.SIG_DFL:
                self._handle(signum, self._on_told)
        self.installed = True

    def uninstall(self) -> None:
        """Give the signals back, where they are still ours."""
        if not self.installed or threading.current_thread() is not threading.main_thread():
            return
        self.installed = False
        current = signal.set_wakeup_fd(self._old_writer)
        if current != self._writer:
            signal.set_wakeup_fd(current)
        for signum, (ours, before) in self._handlers.items():
            if signal.getsignal(signum) == ours:
                signal.signal(signum, before)

    def former(self, signum: int) -> Any:
        """What handled a signal before this took it."""
        return self._handlers[signum][1]

    def raise_error(self, error: BaseException) -> None:
        """Raise `error` in the main thread as soon as it runs Python code; see `_raise`. Waits as long as that does."""
        self._set_error(error)
        self.wake()
        time.sleep(_PATIENCE)
        self.wake()

    def _set_error(self, error: BaseException) -> None:
        self._error = error
        self._patient_until = time.monotonic() + _PATIENCE

    @property
    def waits_to_raise(self) -> bool:
        """Whether `wake` has to be called again."""
        return self._error is not None and not self.quiet

    def take_error(self) -> BaseException | None:
        """What is still to be raised; it is not raised any more."""
        error, self._error = self._error, None
        return error

    def ignores_interrupt(self, since: float) -> bool:
        """Whether Ctrl-C, which came at `since`, has not reached the main thread: it is in a call that does not return.

        A handler of the user's counts as an answer.
        """
        handler = signal.getsignal(signal.SIGINT)
        return handler == self._on_interrupt and self._interrupted_at < since - _CLOSE

    def forward(self, signum: int) -> None:
        """Hand a signal on to whoever watched the signals before us."""
        if self.installed and self._old_writer >= 0:
            with contextlib.suppress(OSError):
                os.write(self._old_writer, bytes([signum]))

    def _handle(self, signum: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handlers[signum] = (handler, signal.signal(signum, handler))

    def wake(self) -> None:
        """Let the main thread handle its signals, where it sleeps because another thread got them.

        Not at once: Python's line editing breaks where a handler runs between Ctrl-C and its `KeyboardInterrupt`.
        """
        if self.installed:
            signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)

    def _on_wake(self, signum: int, frame: FrameType | None) -> None:
        self._raise()

    def _raise(self) -> None:
        """Raise what is to be raised, but not into a `finally` that runs because a lost peer's error came first.

        That would end the script's own cleaning up in the middle. A call some time later raises it all the same: the
        script may have caught the error, and go on.
        """
        handles_error = sys.exc_info()[1] is not None
        if self.quiet or (handles_error and time.monotonic() < self._patient_until):
            return
        error = self.take_error()
        if error is not None:
            raise error

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted_at = time.monotonic()
        if not self.quiet:
            signal.default_int_handler(signum, frame)

    def _on_end(self, signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # again: an event loop may have taken the wake-up descriptor
            os.write(self._writer, bytes([signum]))
        if not self.quiet and not self.unwound:
            self.unwound = True
            self._set_error(SystemExit(128 + signum))
            self._raise()

    def _on_told(self, signum: int, frame: FrameType | None) -> None:
        """The pipe has it."""


def leave_signals_to_main_thread() -> None:
    """In a thread of ours: where the main thread sleeps, a signal wakes it only if that thread itself gets it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*ASKING, _WAKE))


def is_wake(signum: int) -> bool:
    """Whether a signal is only our own call to the main thread."""
    return bool(signum == _WAKE)


def interrupt_is_for_debugger() -> bool:
    """Whether Ctrl-C belongs to a debugger: it asks for a stop, or only clears the debugger's prompt."""
    bdb = sys.modules.get("bdb")
    if bdb is None:
        return False
    if isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), bdb.Bdb):
        return True
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        stopped = frame.f_code.co_name in ("trace_dispatch", "interaction")
        if stopped and isinstance(frame.f_locals.get("self"), bdb.Bdb):
            return True
        frame = frame.f_back
    return False
