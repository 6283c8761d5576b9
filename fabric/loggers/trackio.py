# SPDX-License-Identifier: Apache-2.0
"""Trackio."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from fabric.loggers.client import ClientLogger
from fabric.loggers.values import as_flat_dict
from fabric.utilities.rank_zero import rank_zero_only


class TrackioLogger(ClientLogger):
    """Records metrics with Trackio. `experiment` is the `trackio.Run`.

    Args:
        project: The project.
        version: Name of the run; one of that name is continued. By default Trackio makes one up.
        prefix: Put before the name of each metric, with a `-` between.
        **kwargs: For `trackio.init`: `config`, `group`, `space_id`, ...

    Raises:
        ModuleNotFoundError: If `trackio` is not installed.

    Example::

        fabric = Fabric(loggers=TrackioLogger("gpt", version="large"))
        fabric.log("loss", loss, step=step)
    """

    extra = "trackio"
    requirement = "trackio>=0.43"

    def __init__(
        self, project: str = "fabric_logs", version: str | None = None, prefix: str = "", **kwargs: Any
    ) -> None:
        super().__init__(project, version, prefix)
        self._config = dict(kwargs.pop("config", None) or {})
        self._kwargs = kwargs

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Add them to the run's config. Trackio writes that with the first metrics of a run that is started."""
        self._config.update(as_flat_dict(params))
        self.finalize("success")  # what comes next continues the run

    @override
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        import trackio

        settings = {"project": self._name, "name": self._version, "config": self._config, "resume": "allow"}
        run = trackio.init(**{**settings, **self._kwargs})
        self._version = run.name
        return run, lambda status: run.finish()

    @override
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        self.experiment.log(metrics, step=step)
