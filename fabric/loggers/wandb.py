# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from fabric.loggers.client import ClientLogger
from fabric.loggers.values import as_dict
from fabric.utilities.rank_zero import rank_zero_only


class WandbLogger(ClientLogger):
    """Sends metrics to Weights & Biases. `experiment` is the `wandb.Run`.

    Each call of `log_metrics` is a row of its own, that W&B's own process has at once and writes to the disk every 15
    seconds. `step` is a column and the x-axis of all charts, so that steps may come in any order; W&B's own counter
    would drop rows that go back.

    Args:
        project: The project; by default what W&B's settings say.
        version: Id of the run; a run of that id is continued. By default W&B makes one up.
        offline: Write to the disk only, for `wandb sync` later.
        prefix: Put before the name of each metric, with a `-` between.
        **kwargs: For `wandb.init`: `name` (of the run), `dir`, `config`, `tags`, `group`, `entity`, ...

    Raises:
        ModuleNotFoundError: If `wandb` is not installed.

    Example::

        fabric = Fabric(loggers=WandbLogger(project="gpt", name="large", tags=["a"]))
        fabric.log("loss", loss, step=step)
        fabric.logger.experiment.log({"sample": wandb.Image(image)})
    """

    extra = "wandb"

    def __init__(
        self,
        project: str | None = None,
        version: str | None = None,
        offline: bool = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(project, version, prefix)
        self._kwargs = {**({"mode": "offline"} if offline else {}), **kwargs}

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self.experiment.config.update(as_dict(params), allow_val_change=True)

    @override
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        import wandb

        run = wandb.init(**{"project": self._name, "id": self._version, "resume": "allow", **self._kwargs})
        run.define_metric("step")
        run.define_metric("*", step_metric="step", step_sync=True)
        self._name, self._version = run.project or self._name, run.id
        return run, lambda status: run.finish(exit_code=int(status != "success"))

    @override
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        self.experiment.log(metrics if step is None else {**metrics, "step": step})
