# SPDX-License-Identifier: Apache-2.0
"""Who failed first, from what was seen."""

import socket
from collections.abc import Collection, Sequence

import pytest

from fabric.processes.record import Record
from fabric.processes.verdict import Ended, Failure, Sight, describe_code, first_failure, signal_report

HOST = socket.gethostname()


def record(rank: int, time: float, kind: str = "ValueError", **more: object) -> Record:
    felt = kind != "ValueError"
    options = {"felt": felt, "lost_peer": kind == "lost", **more}
    return Record(rank, HOST, 100 + rank, time, f"{kind}: boom", f"Traceback of {rank}\n", **options)  # type: ignore[arg-type]


def ended(rank: int, code: int, at: float) -> Ended:
    return Ended(rank, 100 + rank, code, at)


def judge(
    *records: Record,
    ended: Sequence[Ended] = (),
    running: Collection[int] = (),
    ends: dict[int, float] | None = None,
    now: float = 10.0,
    asked: int = 0,
) -> Failure | float | None:
    by_rank = {record.rank: record for record in records}
    marks = {rank: (time, 100 + rank) for rank, time in (ends or {}).items()}
    return first_failure(Sight(ended, by_rank, marks, running, now, asked))


def who(failure: Failure | float | None) -> tuple[int, int, str]:
    assert isinstance(failure, Failure)
    return failure.rank, failure.code, failure.how


def test_nobody_failed() -> None:
    assert judge() is None
    assert judge(ended=[ended(1, 0, 5.0)], running=[2]) is None


def test_a_death_without_a_record() -> None:
    assert who(judge(ended=[ended(1, 17, 5.0)])) == (1, 17, "exit code 17")
    assert who(judge(ended=[ended(1, -15, 5.0)])) == (1, 143, "SIGTERM (signal 15)")
    assert who(judge(ended=[ended(2, 3, 5.1), ended(1, 17, 5.0)])) == (1, 17, "exit code 17")


def test_the_earliest_record_counts() -> None:
    first = judge(record(2, 5.0), record(1, 6.0), ended=[ended(1, 1, 6.1)], running=[2, 3])
    assert who(first) == (2, 1, "ValueError: boom (exit code 1)")
    assert isinstance(first, Failure)
    assert first.traceback == "Traceback of 2\n"


def test_the_exit_code_of_a_record_is_its_processs() -> None:
    assert who(judge(record(1, 5.0), ended=[ended(1, 4, 5.1)])) == (1, 4, "ValueError: boom (exit code 4)")
    assert who(judge(record(1, 5.0, signal=2))) == (1, 130, "SIGINT (signal 2)")


@pytest.mark.parametrize(("at", "first"), [(4.0, 2), (5.5, 2), (6.0, 2), (6.1, 1)])
def test_a_death_up_to_a_second_after_the_first_record_came_before_it(at: float, first: int) -> None:
    assert who(judge(record(1, 5.0, "RuntimeError"), ended=[ended(2, -9, at), ended(1, 1, 5.1)]))[0] == first


def test_waits_a_second_for_such_a_death() -> None:
    felt = record(1, 5.0, "RuntimeError")
    assert judge(felt, running=[2], now=5.1) == 6.0
    assert who(judge(felt, running=[2], now=6.0))[0] == 1
    assert who(judge(felt, running=[1], now=5.1))[0] == 1  # there is nobody left who could have died
    assert who(judge(record(1, 5.0), running=[2], now=5.1))[0] == 1  # an error that no death causes


def test_who_blames_a_lost_peer_stands_behind() -> None:
    assert who(judge(record(0, 5.0, "lost"), record(1, 5.2)))[0] == 1
    assert who(judge(record(0, 5.0, "lost"), record(1, 6.2)))[0] == 0


def test_a_rank_that_left_while_another_communicated() -> None:
    left = judge(record(0, 5.0, "lost"), ended=[ended(1, 0, 4.9)])
    assert who(left) == (1, 1, "its script ended while rank 0 still communicated with it")
    assert isinstance(left, Failure)
    assert left.traceback == "Traceback of 0\n"
    assert left.traceback_of == f"rank 0 on host `{HOST}` (pid 100), which rank 1 left behind"
    assert who(judge(record(0, 5.0, "lost"), ends={1: 4.9}))[0] == 1
    assert who(judge(record(0, 5.0, "lost"), ended=[ended(1, 0, 7.0)]))[0] == 0
    assert who(judge(record(0, 5.0, "RuntimeError"), ended=[ended(1, 0, 4.9)]))[0] == 0


def test_the_exit_code_of_a_script_that_ended_is_waited_for() -> None:
    lost = record(0, 5.0, "lost")
    assert judge(lost, ends={1: 4.9}, running=[1], now=6.5) == 10.0
    assert who(judge(lost, ends={1: 4.9}, ended=[ended(1, 3, 7.0)])) == (1, 3, "exit code 3")


def test_what_a_signal_from_outside_does_is_no_failure() -> None:
    deaths = [ended(1, -15, 5.0), ended(2, 143, 5.0), ended(3, 0, 5.0)]
    assert judge(record(0, 5.1, "lost"), ended=deaths, asked=15) is None
    assert who(judge(record(0, 5.1), ended=deaths, asked=15))[0] == 0
    assert who(judge(ended=[ended(1, -9, 5.0)], asked=15))[0] == 1


def test_the_report() -> None:
    failure = Failure(1, "box", 7, 1, "ValueError: boom (exit code 1)", "Traceback\nValueError: boom\n")
    assert failure.report() == (
        "\nfabric: the traceback of rank 1 on host `box` (pid 7):\n\nTraceback\nValueError: boom\n"
        "\nfabric: rank 1 on host `box` (pid 7) failed first: ValueError: boom (exit code 1). All ranks have ended.\n"
    )
    assert Failure(1, "box", 0, 9, "exit code 9").report() == (
        "\nfabric: rank 1 on host `box` failed first: exit code 9. All ranks have ended.\n"
    )
    assert signal_report(15, who="rank 0") == "\nfabric: rank 0 got SIGTERM (signal 15). All ranks have ended.\n"


def test_exit_codes_for_people() -> None:
    assert describe_code(3) == "exit code 3"
    assert describe_code(-9) == "SIGKILL (signal 9); the system sends it when memory runs out"
    assert describe_code(-11) == "SIGSEGV (signal 11)"
    assert describe_code(-77) == "signal 77"
