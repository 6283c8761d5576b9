# SPDX-License-Identifier: Apache-2.0
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from fabric.processes.main_thread import MainThread, RankFailed


@pytest.fixture
def main_thread() -> Iterator[MainThread]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    main = MainThread(writer, ending="unwind")
    main.install()
    yield main
    main.uninstall()
    os.close(reader)
    os.close(writer)


def test_a_finally_that_a_lost_peer_began_is_not_cut_short(main_thread: MainThread) -> None:
    done = []
    thread = threading.Thread(target=main_thread.raise_error, args=(RankFailed("", 17),))

    def script() -> None:
        try:
            try:
                raise ConnectionResetError("what a collective says")
            finally:
                thread.start()
                while not main_thread.waits_to_raise:
                    pass
                main_thread.wake()
                done.append("finally")
        except ConnectionResetError:
            done.append("caught")
        thread.join()  # it wakes this thread again

    with pytest.raises(RankFailed):
        script()
    thread.join()
    assert done == ["finally", "caught"]


def test_an_except_that_never_ends_is_ended(main_thread: MainThread) -> None:
    def script() -> None:
        try:
            raise ConnectionResetError("what a collective says")
        except ConnectionResetError:
            main_thread.raise_error(RankFailed("", 17))
            pytest.fail("went on")

    with pytest.raises(RankFailed):
        script()


def test_a_second_signal_does_not_end_the_unwinding_of_the_first(main_thread: MainThread) -> None:
    done = []

    def script() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            done.append("went on")
        finally:
            signal.raise_signal(signal.SIGTERM)
            done.append("finally")

    with pytest.raises(SystemExit) as raised:
        script()
    assert raised.value.code == 143
    assert done == ["finally"]
