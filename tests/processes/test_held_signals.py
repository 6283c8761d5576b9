# SPDX-License-Identifier: Apache-2.0
"""Signals that wait for a good place in a loop."""

import os
import signal
from collections.abc import Iterator

import pytest

from fabric.processes.held_signals import HeldSignals
from fabric.processes.main_thread import MainThread

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def held() -> Iterator[HeldSignals]:
    held = HeldSignals(SIGNALS)
    held.install()
    yield held
    held.uninstall()
    assert [signal.getsignal(signum) for signum in SIGNALS] == [signal.SIG_DFL, signal.SIG_DFL]


def test_the_first_signal_is_remembered(held: HeldSignals) -> None:
    assert (held.received, held.effect) == (0, 0)
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert (held.received, held.effect) == (signal.SIGUSR1, signal.SIGUSR1)


def test_a_handler_of_the_users_is_called_and_has_the_last_word() -> None:
    calls: list[int] = []

    def handler(signum: int, frame: object) -> None:
        calls.append(signum)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        held = HeldSignals(SIGNALS)
        held.install()
        signal.raise_signal(signal.SIGTERM)
        assert (calls, held.received, held.effect) == ([signal.SIGTERM], signal.SIGTERM, 0)
        held.uninstall()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        held = HeldSignals(SIGNALS)
        held.install()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        held.uninstall()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_who_took_a_signal_since_keeps_it() -> None:
    held = HeldSignals(SIGNALS)
    held.install()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held.uninstall()
    try:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("first", ["the main thread's own", "held"])
def test_the_supervision_that_was_there_before_may_go_first(first: str) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    main, held = MainThread(writer, ending="unwind"), HeldSignals(SIGNALS)
    main.install()
    held.install()
    signal.raise_signal(signal.SIGTERM)  # which raises nothing now
    assert held.effect == signal.SIGTERM
    for each in (main, held) if first != "held" else (held, main):
        each.uninstall()
    os.close(reader)
    os.close(writer)
    assert [signal.getsignal(signum) for signum in SIGNALS] == [signal.SIG_DFL, signal.SIG_DFL]


def test_forked_children_can_be_ended_and_outlive_a_schedulers_notice(held: HeldSignals) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and _outlives(signal.SIGUSR1) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert held.received == 0


def _outlives(signum: int) -> bool:
    signal.raise_signal(signum)
    return True
