# SPDX-License-Identifier: Apache-2.0
"""When a checkpoint is due."""

import time
from datetime import timedelta


class Schedule:
    """Due every so many steps, or every so much time.

    Args:
        every: Steps, or time from the end of one save to the next.
    """

    def __init__(self, every: int | timedelta) -> None:
        self._steps = every if isinstance(every, int) else 0
        self._seconds = every.total_seconds() if isinstance(every, timedelta) else 0.0
        self._step: int | None = None
        self._saved_at = time.monotonic()
        self.by_time = isinstance(every, timedelta)

    def reaches(self, step: int) -> bool:
        """Whether a multiple of the steps lies between the last call, or the last save, and this one."""
        before = step - 1 if self._step is None else self._step
        self._step = step
        return bool(self._steps) and step // self._steps > before // self._steps

    def time_is_up(self) -> bool:
        """Whether it is due by this process's clock."""
        return self.by_time and time.monotonic() - self._saved_at >= self._seconds

    def saved(self, step: int) -> None:
        """This step is in a checkpoint: it was written, or the run goes on from it."""
        self._step = step
        self._saved_at = time.monotonic()
