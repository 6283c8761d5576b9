# SPDX-License-Identifier: Apache-2.0
"""Whether any rank has something to say, asked at every step."""

import time
from collections.abc import Callable

from fabric.checkpoint.keeping.job import Ranks

# Seconds of a step from which on the answer is waited for: the wait, a millisecond or so, is nothing beside it.
_LONG = 0.25


class Attention:
    """Votes of all ranks, one for each call.

    Where steps are short, the vote of one step travels during the next, which then has its answer; where they are long,
    that would be late, and the answer is waited for. Which it is, the ranks agree on now and then by rank 0's clock.

    Args:
        ranks: Carries the votes.
        long: Seconds of a step that is long.
    """

    def __init__(self, ranks: Ranks, *, long: float = _LONG) -> None:
        self._ranks = ranks
        self._long = long
        self._waits = True
        self._calls = 0
        self._measured_at = time.monotonic()
        self._measured_calls = 0
        self._unread: Callable[[], bool] | None = None

    def ask(self, flag: bool) -> bool:
        """Whether any rank says True, now or, where steps are short, at the call before."""
        if self._ranks.world_size == 1:
            return flag
        self._calls += 1
        if self._calls > 1 and self._calls & (self._calls - 1) == 0:  # 2, 4, 8, ...: seldom, and all ranks at once
            self._waits = self._steps_are_long()
        answer = self.unread()
        vote = self._ranks.start_boolean_decision(flag, all=False)
        if self._waits:
            return vote() or answer
        self._unread = vote
        return answer

    def unread(self) -> bool:
        """The answer of the last vote, where nobody has had it yet."""
        vote, self._unread = self._unread, None
        return vote() if vote is not None else False

    def forget(self) -> None:
        """Leave the last answer unread: other ranks may not have voted."""
        self._unread = None

    def _steps_are_long(self) -> bool:
        now, calls = time.monotonic(), self._calls - self._measured_calls
        long = self._ranks.is_global_zero and now - self._measured_at >= self._long * calls
        self._measured_at, self._measured_calls = now, self._calls
        return self._ranks.start_boolean_decision(long, all=False)()
