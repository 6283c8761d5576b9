# SPDX-License-Identifier: Apache-2.0
"""Records of failed ranks."""

import os
import shutil
import socket

import pytest

from fabric.processes.errors import record_of
from fabric.processes.record import Records


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_a_record_says_who_and_why() -> None:
    record = record_of(raised(ValueError("boom")), rank=3)
    assert (record.rank, record.host, record.pid) == (3, socket.gethostname(), os.getpid())
    assert record.summary == "ValueError: boom"
    assert record.traceback.startswith("Traceback (most recent call last):\n")
    assert record.traceback.endswith("ValueError: boom\n")
    assert not record.felt
    assert not record.lost_peer


def test_the_summary_is_one_line_with_the_type() -> None:
    assert record_of(RuntimeError("The ranks differ:\n  rank 0: a\nAdvice."), rank=0).summary == (
        "RuntimeError: The ranks differ"
    )
    noted = ValueError("boom")
    noted.__notes__ = ["a note"]  # what `add_note` does since Python 3.11
    assert record_of(noted, rank=0).summary == "ValueError: boom"
    with pytest.raises(SyntaxError) as raised:
        compile("a b", "main.py", "exec")
    assert record_of(raised.value, rank=0).summary == "SyntaxError: invalid syntax"


@pytest.mark.parametrize(
    ("error", "felt", "lost_peer"),
    [
        (ValueError("connection"), False, False),
        (RuntimeError("boom"), True, False),
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:43915"), True, True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True, True),
        (RuntimeError("`fabric.barrier` at main.py:7: rank 1 will not come. It has NaN."), True, True),
        (ConnectionResetError(), True, True),
        (raised(ValueError("batch 3"), RuntimeError("Connection reset by peer")), True, True),
        (FileNotFoundError("x"), True, False),
    ],
)
def test_which_errors_another_ranks_end_may_cause(error: BaseException, felt: bool, lost_peer: bool) -> None:
    record = record_of(error, rank=0)
    assert (record.felt, record.lost_peer) == (felt, lost_peer)


def test_records_are_read_back() -> None:
    records = Records.create()
    try:
        record = record_of(raised(ValueError("b\u00fcm \ud800")), rank=3)
        assert records.read() == {}
        records.write(record)
        assert records.read() == {3: record}
        records.mark_end(1)
        assert records.ends()[1][1] == os.getpid()
        assert records.claim("gone")
        assert not records.claim("gone")
    finally:
        records.remove()
    assert not [name for name in os.listdir(os.path.dirname(records.directory)) if name.startswith(name_of(records))]


def name_of(records: Records) -> str:
    return os.path.basename(records.directory).removesuffix("-ended")


def test_a_rank_whose_launcher_is_gone_writes_nothing() -> None:
    records = Records.create()
    shutil.rmtree(records.directory)
    records.write(record_of(raised(ValueError("boom")), rank=0))
    records.mark_end(0)
    assert records.read() == {}
    assert records.ends() == {}
    assert not records.claim("gone")
