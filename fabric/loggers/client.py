# SPDX-License-Identifier: Apache-2.0
"""What all loggers over somebody else's client library share."""

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from typing_extensions import override

from fabric.loggers.ending import Ending
from fabric.loggers.logger import Logger
from fabric.loggers.null import NullExperiment
from fabric.loggers.values import as_numbers
from fabric.utilities.imports import require_extra
from fabric.utilities.rank_zero import global_rank, rank_zero_only


class ClientLogger(Logger, ABC):
    """Hands on what is logged to a client library's own object, which global rank 0 makes when it is first used.

    The run is closed by `finalize`, and without it when the logger is gone or the process ends: as failed where an
    exception ended the program, else as a success. What is logged after that continues the same run.

    Class attributes:
        extra: The extra of `fabric-runtime` that brings the client.
        requirement: The package itself, where its name is another one.

    Args:
        name: The experiment or project, as the client calls it.
        version: The id of a run to continue; by default a new one is started.
        prefix: Put before the name of each metric, with a `-` between.

    Raises:
        ModuleNotFoundError: If the client is not installed, on every rank.
    """

    extra: ClassVar[str]
    requirement: ClassVar[str | None] = None

    def __init__(self, name: str | None = None, version: str | None = None, prefix: str = "") -> None:
        require_extra(type(self).__name__, extra=self.extra, requirement=self.requirement)
        self._name = name
        self._version = version
        self._prefix = prefix
        self._client: Any = None
        self._end: Ending | None = None
        self._owner = os.getpid()
        self._last_step = -1

    @abstractmethod
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        """Start the run, or continue that of `version`, and note its id there. Called on global rank 0.

        Returns:
            The client's own object, and what closes it, told `"success"` or `"failed"`; that must not refer to `self`.
        """

    @abstractmethod
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        """Hand numbers to the client; called on global rank 0, with prefixed names."""

    def _flush(self, client: Any) -> None:
        """Let the client write out what it holds back; called on global rank 0."""

    @property
    @override
    def name(self) -> str | None:
        """The experiment or project, as the client calls it."""
        return self._name

    @property
    @override
    def version(self) -> int | str | None:
        """The id of the run; where it was not given, known on rank 0 once the run has started."""
        return self._version

    @property
    def experiment(self) -> Any:
        """The client's own object; on the other ranks one that takes any call and does nothing."""
        if global_rank() != 0:
            return NullExperiment()
        if self._opened is None:
            drawn = random.getstate()
            self._client, close = self._open()
            random.setstate(drawn)  # some make up a name for the run, which must not change the run
            self._end, self._owner = Ending(self, close), os.getpid()
        return self._client

    @property
    def _opened(self) -> Any:
        """The client's object, if there is one and it is not closed; what a forked process inherits is not its own."""
        is_open = self._owner == os.getpid() and self._end is not None and self._end.is_ahead
        return self._client if is_open else None

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._send(as_numbers(metrics, self._prefix), step)

    @override
    def save(self) -> None:
        if (client := self._opened) is not None:
            self._flush(client)

    @override
    def finalize(self, status: str) -> None:
        self.save()
        if self._end is not None and self._opened is not None:
            self._end(status)
        self._client = self._end = None

    def _counted(self, step: int | None) -> int:
        """The step, for clients that do not count themselves: one more than the last where none is given."""
        self._last_step = self._last_step + 1 if step is None else step
        return self._last_step

    def __getstate__(self) -> dict[str, Any]:
        self.save()
        return {**self.__dict__, "_client": None, "_end": None}
