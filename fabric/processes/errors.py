# SPDX-License-Identifier: Apache-2.0
"""From an exception that nobody caught to the record of it."""

import os
import re
import time
import traceback
from collections.abc import Iterator

from fabric.processes.record import Record, host_name

# What PyTorch's backends, and debug mode, say where another process went away.
_LOST_PEER = (
    r"connection|closed by peer|reset by peer|broken pipe|socket|remote (process|worker|peer)|time[d ]*out|unreachable"
    r"|failed to recv|ncclRemoteError|rank 0 is gone|rank \d+ will not come"
)


def record_of(error: BaseException, *, rank: int, signal: int = 0) -> Record:
    """The record of an exception that nobody caught."""
    return Record(
        rank=rank,
        host=host_name(),
        pid=os.getpid(),
        time=time.time(),
        summary=_line_of(error),
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        felt=any(isinstance(cause, (RuntimeError, OSError, EOFError)) for cause in _causes(error)),
        lost_peer=any(_says_lost_peer(cause) for cause in _causes(error)),
        signal=signal,
    )


def _line_of(error: BaseException) -> str:
    """Type and first line: notes and more lines may follow, and before that of a syntax error stands its place."""
    parts = traceback.format_exception_only(type(error), error)
    return parts[-1 if isinstance(error, SyntaxError) else 0].strip().splitlines()[0].rstrip(": ")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _says_lost_peer(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, EOFError, TimeoutError)):
        return True
    return isinstance(error, RuntimeError) and re.search(_LOST_PEER, str(error), re.IGNORECASE) is not None
