# SPDX-License-Identifier: Apache-2.0
"""Signals that wait: a loop comes to a good place first, and then they do what they would have done."""

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from fabric.processes.forks import in_forked_children
from fabric.processes.main_thread import ASKING, MainThread


class HeldSignals:
    """Takes signals away from their handlers for a while, and remembers the first that came.

    A handler of the user's own is still called when its signal comes, so that there is nothing to make up for. Only
    the main thread can take signals; elsewhere this does nothing. Signals that are ignored stay ignored.

    Args:
        signals: Their numbers.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.signals = tuple(signals)
        self._former: dict[int, Any] = {}
        self.received = 0
        self.effect = 0  # the signal whose effect is still to come; 0 where a handler of the user's was called

    def install(self) -> None:
        """Take the signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in self.signals:
            former = signal.getsignal(signum)
            if former not in (signal.SIG_IGN, None):
                self._former[signum] = former
                signal.signal(signum, self._on_signal)
        in_forked_children(self._forget)

    def uninstall(self) -> None:
        """Give the signals back, where they are still ours."""
        if threading.current_thread() is threading.main_thread():
            self._give_back(tuple(self._former))

    def _give_back(self, signals: Iterable[int]) -> None:
        for signum in signals:
            former = self._former.pop(signum, None)
            if former is None or signal.getsignal(signum) != self._on_signal:
                continue
            owner = getattr(former, "__self__", None)
            if isinstance(owner, MainThread) and not owner.installed:  # `fabric.teardown()` came first
                former = owner.former(signum)
            signal.signal(signum, former)

    def _forget(self) -> None:
        """In a forked child, such as a data worker: whoever asks it to end means it.

        The other signals stay without effect there: schedulers send SIGUSR1 to each process of a job.
        """
        self._give_back([signum for signum in self._former if signum in ASKING])

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        former = self._former.get(signum)
        theirs = None if isinstance(getattr(former, "__self__", None), MainThread) else former
        if not self.received:
            self.received = signum
            self.effect = 0 if callable(theirs) else signum
        if callable(theirs):
            theirs(signum, frame)
