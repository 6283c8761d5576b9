# SPDX-License-Identifier: Apache-2.0
"""What a rank leaves behind for its launcher: why it failed, or that it came to its end."""

import contextlib
import json
import os
import time
from typing import NamedTuple


class Record(NamedTuple):
    """The failure of one rank, as the rank saw it.

    Args:
        rank: Global rank.
        host: Its machine.
        pid: Its process.
        time: When it failed, in seconds since the epoch.
        summary: The exception in one line.
        traceback: The exception in full.
        felt: The kind of exception that the end of another rank may cause.
        lost_peer: It says that another process went away.
        signal: The signal that it ended for; 0 for none.
    """

    rank: int
    host: str
    pid: int
    time: float
    summary: str
    traceback: str
    felt: bool = False
    lost_peer: bool = False
    signal: int = 0


def host_name() -> str:
    """The name of this machine."""
    return os.uname().nodename


class Records:
    """The directory through which the ranks of one machine tell their launcher how they ended."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    @classmethod
    def create(cls) -> "Records":
        # As `tempfile.mkdtemp` does, which takes as long to import as all of supervision.
        directory = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"fabric-{os.getpid()}-{time.time_ns()}")
        os.mkdir(directory, mode=0o700)
        return cls(directory)

    def write(self, record: Record) -> None:
        """Leave a record, whole or not at all. Where the directory is gone, so is the launcher that would read it."""
        path = os.path.join(self.directory, f"{record.rank}.json")
        try:
            with open(f"{path}.new", "w", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(record._asdict(), file)
            os.replace(f"{path}.new", path)
        except OSError:
            pass

    def read(self) -> dict[int, Record]:
        """The records so far, by rank."""
        records = {}
        for name in self._names(".json"):
            with open(os.path.join(self.directory, name), encoding="utf-8") as file:
                record = Record(**json.load(file))
            records[record.rank] = record
        return records

    def mark_end(self, rank: int) -> None:
        """Say that the script of `rank` came to its end."""
        try:
            with open(os.path.join(self.directory, f"{rank}.end"), "w", encoding="utf-8") as file:
                file.write(str(os.getpid()))
        except OSError:
            pass

    def ends(self) -> dict[int, tuple[float, int]]:
        """When the scripts ended that did, and the pids of their processes, by rank."""
        ends = {}
        for name in self._names(".end"):
            path = os.path.join(self.directory, name)
            with open(path, encoding="utf-8") as file:
                ends[int(name.removesuffix(".end"))] = (os.stat(path).st_mtime, int(file.read() or 0))
        return ends

    def claim(self, name: str) -> bool:
        """True for the first who asks: of several that could do it, one does."""
        try:
            os.close(os.open(os.path.join(self.directory, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Take the directory away, first from those who may still write into it."""
        with contextlib.suppress(OSError):
            os.rename(self.directory, f"{self.directory}-ended")
            self.directory = f"{self.directory}-ended"
        for name in self._names(""):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.directory, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)

    def _names(self, ending: str) -> list[str]:
        try:
            return [name for name in os.listdir(self.directory) if name.endswith(ending)]
        except OSError:
            return []
