# SPDX-License-Identifier: Apache-2.0
"""Comet."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from fabric.loggers.client import ClientLogger
from fabric.loggers.values import as_flat_dict
from fabric.utilities.rank_zero import rank_zero_only


class CometLogger(ClientLogger):
    """Sends metrics to Comet. `experiment` is the `comet_ml.CometExperiment`.

    Comet has no state for a run that failed: `finalize` notes how it ended under "Other" as `status`. Where nobody
    calls it, Comet closes the experiment by itself at the end of the program, and nothing is noted.

    Args:
        project: The project; by default Comet's own.
        version: Key of the experiment; one of that key is continued. By default Comet makes one up.
        offline: Write an archive to the disk only, for `comet upload` later. It is complete once the run is finalized.
        prefix: Put before the name of each metric, with a `-` between.
        **kwargs: For `comet_ml.start`: `workspace`, `experiment_config=comet_ml.ExperimentConfig(name=...)`, ...

    Raises:
        ModuleNotFoundError: If `comet-ml` is not installed.

    Example::

        fabric = Fabric(loggers=CometLogger(project="gpt"))
        fabric.log("loss", loss, step=step)
        fabric.logger.experiment.log_image(image)
    """

    extra = "comet"
    requirement = "comet-ml"

    def __init__(
        self,
        project: str | None = None,
        version: str | None = None,
        offline: bool = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(project, version, prefix)
        self._kwargs = {**({"online": False} if offline else {}), **kwargs}

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self.experiment.log_parameters(as_flat_dict(params))

    @override
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        import comet_ml

        experiment = comet_ml.start(project_name=self._name, experiment_key=self._version, **self._kwargs)
        self._version = experiment.get_key()

        def close(status: str) -> None:
            if not experiment.ended:
                experiment.log_other("status", status)
                experiment.end()

        return experiment, close

    @override
    def _flush(self, client: Any) -> None:
        client.flush()

    @override
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        self.experiment.log_metrics(metrics, step=self._counted(step))
