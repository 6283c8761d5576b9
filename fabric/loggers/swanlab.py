# SPDX-License-Identifier: Apache-2.0
"""SwanLab."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from fabric.loggers.client import ClientLogger
from fabric.loggers.values import as_dict
from fabric.utilities.rank_zero import rank_zero_only


class SwanLabLogger(ClientLogger):
    """Sends metrics to SwanLab. `experiment` is the `swanlab.Run`.

    Args:
        project: The project; by default what SwanLab's settings say.
        version: Id of the run; one of that id is continued. By default SwanLab makes one up.
        prefix: Put before the name of each metric, with a `-` between.
        **kwargs: For `swanlab.init`: `name` (of the run), `mode` (`"offline"`, `"local"`, ...), `log_dir`, `tags`, ...

    Raises:
        ModuleNotFoundError: If `swanlab` is not installed.

    Example::

        fabric = Fabric(loggers=SwanLabLogger("gpt", name="large", mode="offline"))
        fabric.log("loss", loss, step=step)
    """

    extra = "swanlab"

    def __init__(self, project: str | None = None, version: str | None = None, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(project, version, prefix)
        self._kwargs = kwargs

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self.experiment.config.update(as_dict(params))

    @override
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        import swanlab

        same = {} if self._version is None else {"id": self._version, "resume": "allow"}
        run = swanlab.init(**{"project": self._name, **same, **self._kwargs})
        self._version = run.id

        def close(status: str) -> None:
            if run.alive:
                run.finish(*(() if status == "success" else ("crashed", "the run failed")))

        return run, close

    @override
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        self.experiment.log(metrics, step=step)
