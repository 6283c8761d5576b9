# SPDX-License-Identifier: Apache-2.0
"""Watching a run: loggers, callbacks."""

from collections.abc import Mapping
from typing import Any

from fabric.callbacks import Callbacks
from fabric.facade.identity import Identity
from fabric.loggers import Logger
from fabric.utilities.apply_func import convert_tensors_to_scalars


class Observe(Identity):
    """Loggers and callbacks."""

    _loggers: list[Logger]
    _callbacks: Callbacks

    @property
    def logger(self) -> Logger:
        """The first logger."""
        if not self._loggers:
            raise RuntimeError("`fabric.logger`: there is no logger. Pass one: `Fabric(loggers=CSVLogger('logs'))`.")
        return self._loggers[0]

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._loggers

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Send one number (or a tensor with one element) to every logger; nothing is reduced over ranks."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send numbers by name to every logger; nothing is reduced over ranks."""
        if self._loggers:
            numbers = convert_tensors_to_scalars(metrics)
            for logger in self._loggers:
                logger.log_metrics(numbers, step)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method `hook_name` of each callback that has it, in their order."""
        self._callbacks.call(hook_name, *args, **kwargs)
