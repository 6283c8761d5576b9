# SPDX-License-Identifier: Apache-2.0
"""MLflow."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from typing_extensions import override

from fabric.loggers.client import ClientLogger
from fabric.loggers.values import as_flat_dict
from fabric.utilities.rank_zero import rank_zero_only

T = TypeVar("T")

_PARAMS_PER_CALL = 100  # what MLflow takes at once
_METRICS_PER_CALL = 1000


class MLFlowLogger(ClientLogger):
    """Records metrics in an MLflow store. `experiment` is an `MlflowClient`, `version` the id of the run.

    Each call has written its numbers when it returns. MLflow's "active run" is not touched.

    Args:
        experiment_name: The experiment; it is made where the store does not have it.
        version: Id of the run to continue; by default a new one is made.
        tracking_uri: The store: `http://...`, `sqlite:///file.db`, ...; by default what MLflow's settings say.
        prefix: Put before the name of each metric, with a `-` between.
        **kwargs: For `MlflowClient.create_run`: `run_name`, `tags`.

    Raises:
        ModuleNotFoundError: If `mlflow` is not installed.

    Example::

        fabric = Fabric(loggers=MLFlowLogger("gpt", tracking_uri="sqlite:///mlflow.db", run_name="large"))
        fabric.log("loss", loss, step=step)
        fabric.logger.experiment.log_artifact(fabric.logger.version, "config.yaml")
    """

    extra = "mlflow"

    def __init__(
        self,
        experiment_name: str = "fabric_logs",
        version: str | None = None,
        tracking_uri: str | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(experiment_name, version, prefix)
        self._tracking_uri = tracking_uri
        self._kwargs = kwargs

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        from mlflow.entities import Param

        client = self.experiment
        written = [Param(name, str(value)) for name, value in as_flat_dict(params).items()]
        for some in _chunks(written, _PARAMS_PER_CALL):
            client.log_batch(self._version, params=some)

    @override
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._tracking_uri)
        if self._version is None:
            self._version = client.create_run(self._experiment_id(client), **self._kwargs).info.run_id
        else:
            client.update_run(self._version, status="RUNNING")
        run_id = self._version

        def close(status: str) -> None:
            client.set_terminated(run_id, "FINISHED" if status == "success" else "FAILED")

        return client, close

    def _experiment_id(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(self._name)
        return str(client.create_experiment(self._name) if experiment is None else experiment.experiment_id)

    @override
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        from mlflow.entities import Metric

        client, step, now = self.experiment, self._counted(step), int(time.time() * 1000)
        written = [Metric(name, value, now, step) for name, value in metrics.items()]
        for some in _chunks(written, _METRICS_PER_CALL):
            client.log_batch(self._version, metrics=some)


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
