# SPDX-License-Identifier: Apache-2.0
"""ClearML."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from fabric.loggers.client import ClientLogger
from fabric.loggers.values import as_flat_dict
from fabric.utilities.rank_zero import rank_zero_only


class ClearMLLogger(ClientLogger):
    """Reports metrics to a ClearML task. `experiment` is the `clearml.Task`.

    To work offline, call `clearml.Task.set_offline(True)` first, or set `CLEARML_OFFLINE_MODE=1`.

    Args:
        project: The project.
        version: Id of the task to continue; by default a new one is made.
        prefix: Put before the name of each metric, with a `-` between.
        **kwargs: For `clearml.Task.init`: `task_name`, `tags`, `auto_connect_frameworks`, `output_uri`, ...

    Raises:
        ModuleNotFoundError: If `clearml` is not installed.

    Example::

        fabric = Fabric(loggers=ClearMLLogger("gpt", task_name="large"))
        fabric.log("loss", loss, step=step)
        fabric.logger.experiment.upload_artifact("config", "config.yaml")
    """

    extra = "clearml"

    def __init__(
        self, project: str = "fabric_logs", version: str | None = None, prefix: str = "", **kwargs: Any
    ) -> None:
        super().__init__(project, version, prefix)
        self._kwargs = kwargs

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Set them as the task's parameters; nested ones become sections."""
        self.experiment.update_parameters(as_flat_dict(params))

    @override
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        from clearml import Task

        which: dict[str, Any] = {"reuse_last_task_id": False}
        if self._version is not None:  # 0: steps are what they say, not counted from where the task stopped
            which = {"reuse_last_task_id": self._version, "continue_last_task": 0}
        task = Task.init(**{"project_name": self._name, **which, **self._kwargs})
        self._version = task.id

        def close(status: str) -> None:
            if status != "success":
                task.mark_failed(ignore_errors=True, status_reason="the run failed")
            task.close()

        return task, close

    @override
    def _flush(self, client: Any) -> None:
        client.flush()

    @override
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        report, step = self.experiment.get_logger().report_scalar, self._counted(step)
        for name, value in metrics.items():
            report(title=name, series=name, value=value, iteration=step)
