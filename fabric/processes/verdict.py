# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first: a pure function of what was seen."""

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fabric.processes.record import Record, host_name

# A death noticed up to this many seconds after the first record came before it: the others only felt it.
SETTLE = 1.0
# Seconds that Python may take to end after a script has ended.
LEAVING = 5.0


class Ended(NamedTuple):
    """A rank's process that has ended.

    Args:
        rank: Global rank.
        pid: Its process.
        code: Exit code; -n for signal n.
        at: When that was noticed, in seconds since the epoch.
    """

    rank: int
    pid: int
    code: int
    at: float


class Failure(NamedTuple):
    """The first failure of a job.

    Args:
        rank: Global rank.
        host: Its machine.
        pid: Its process; 0 where that is not known.
        code: What the job exits with: the rank's exit code, 128 + n for signal n.
        how: How it ended, for people: `exit code 17`, `SIGKILL (signal 9)`.
        traceback: Its traceback, empty where it left none.
        traceback_of: Whose traceback it is, where it is another rank's.
    """

    rank: int
    host: str
    pid: int
    code: int
    how: str
    traceback: str = ""
    traceback_of: str = ""

    def report(self) -> str:
        """The text that stands last on the screen."""
        who = f"rank {self.rank} on host `{self.host}`" + (f" (pid {self.pid})" if self.pid else "")
        trace = f"\nfabric: the traceback of {self.traceback_of or who}:\n\n{self.traceback.rstrip()}\n"
        return (trace if self.traceback else "") + f"\nfabric: {who} failed first: {self.how}. All ranks have ended.\n"


class Sight(NamedTuple):
    """All that is known when someone asks who failed.

    Args:
        ended: Processes that have ended.
        records: Records by rank.
        ends: By rank, when a script came to its end, and its pid.
        running: Ranks that may still turn out to have died before.
        now: Seconds since the epoch.
        asked: The signal with which the job was asked to end; 0 for none.
    """

    ended: Sequence[Ended]
    records: Mapping[int, Record]
    ends: Mapping[int, tuple[float, int]]
    running: Collection[int]
    now: float
    asked: int = 0


def first_failure(sight: Sight) -> Failure | float | None:
    """Who failed first; None where nobody has; a number of seconds since the epoch to ask again at where that is open.

    A death without a record that is noticed within a second of the first record wins, since the others only felt it.
    Otherwise it is the earliest record, but one that blames a lost peer stands behind one that does not.
    """
    silent = [e for e in sight.ended if e.code and e.rank not in sight.records and not _expected(e, sight.asked)]
    records = [r for r in sight.records.values() if not (sight.asked and (r.felt or r.signal == sight.asked))]
    first = min(records, key=lambda record: record.time, default=None)
    if first is None:
        return _of_death(min(silent, key=lambda e: e.at)) if silent else None
    deaths = [death for death in silent if _time_of(death, sight) <= first.time + SETTLE]
    if deaths:
        return _of_death(min(deaths, key=lambda death: _time_of(death, sight)))
    open_until = _open_until(first, sight)
    if sight.now < open_until:
        return open_until
    own = [record for record in records if not record.lost_peer and record.time <= first.time + SETTLE]
    if own:
        first = min(own, key=lambda record: record.time)
    return (_left_early(first, sight) if first.lost_peer else None) or _of_record(first, sight.ended)


def _open_until(first: Record, sight: Sight) -> float:
    """Until when another rank may turn out to have failed before `first`."""
    suspects = set(sight.running) - set(sight.records)
    if first.lost_peer and suspects & set(sight.ends):
        return first.time + LEAVING  # its script has ended, with an exit code that is still to come
    return first.time + SETTLE if first.felt and suspects else first.time


def _time_of(death: Ended, sight: Sight) -> float:
    """When a rank failed: it may have taken a while from the end of its script to that of its process."""
    return min(death.at, sight.ends[death.rank][0]) if death.rank in sight.ends else death.at


def _expected(ended: Ended, asked: int) -> bool:
    return bool(asked) and ended.code in (-asked, 128 + asked)


def _of_death(death: Ended) -> Failure:
    return Failure(death.rank, host_name(), death.pid, _shell_code(death.code), describe_code(death.code))


def _of_record(record: Record, ended: Sequence[Ended]) -> Failure:
    codes = [_shell_code(e.code) for e in ended if e.rank == record.rank and e.code]
    code = 128 + record.signal if record.signal else (codes or [1])[0]
    how = _signal_name(record.signal) if record.signal else f"{record.summary.splitlines()[-1]} (exit code {code})"
    return Failure(record.rank, record.host, record.pid, code, how, record.traceback)


def _left_early(record: Record, sight: Sight) -> Failure | None:
    """The rank that came to its end, without an error, before another one lost it in the middle of a collective."""
    gone = {e.rank: (e.at, e.pid) for e in sight.ended if e.code == 0}
    gone.update({rank: end for rank, end in sight.ends.items() if rank not in sight.records})
    # A file system may keep times coarser than the clock.
    early = {rank: end for rank, end in gone.items() if rank != record.rank and end[0] <= record.time + 0.1}
    if not early:
        return None
    rank, (_, pid) = min(early.items(), key=lambda item: item[1])
    how = f"its script ended while rank {record.rank} still communicated with it"
    victim = f"rank {record.rank} on host `{record.host}` (pid {record.pid}), which rank {rank} left behind"
    return _of_record(record, sight.ended)._replace(rank=rank, pid=pid, how=how, traceback_of=victim)


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def describe_code(code: int) -> str:
    """An exit code as people read it."""
    if code >= 0:
        return f"exit code {code}"
    hint = "; the system sends it when memory runs out" if -code == getattr(signal, "SIGKILL", 0) else ""
    return _signal_name(-code) + hint


def signal_report(signum: int, *, who: str) -> str:
    """The text that stands last on the screen where a job was asked to end by a signal."""
    return f"\nfabric: {who} got {_signal_name(signum)}. All ranks have ended.\n"


def person(rank: int, pid: int) -> str:
    """A rank of this machine, for messages."""
    return f"rank {rank} on host `{host_name()}` (pid {pid})"


def _signal_name(signum: int) -> str:
    try:
        return f"{signal.Signals(signum).name} (signal {signum})"
    except ValueError:
        return f"signal {signum}"
