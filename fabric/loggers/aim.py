# SPDX-License-Identifier: Apache-2.0
"""Aim."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from fabric.loggers.client import ClientLogger
from fabric.loggers.values import as_flat_dict
from fabric.utilities.rank_zero import rank_zero_only
from fabric.utilities.types import PathLike


class AimLogger(ClientLogger):
    """Tracks metrics in an Aim repository. `experiment` is the `aim.Run`, `version` its hash.

    Aim has no state for a run that failed: how it ended is the run's attribute `status`.

    Args:
        name: The experiment; by default Aim's own.
        version: Hash of the run to continue; by default a new one is made.
        repo: Folder of the repository, or `aim://...` of a server; by default what Aim finds.
        prefix: Put before the name of each metric, with a `-` between.
        **kwargs: For `aim.Run`: `system_tracking_interval`, `log_system_params`, `capture_terminal_logs`, ...

    Raises:
        ModuleNotFoundError: If `aim` is not installed.

    Example::

        fabric = Fabric(loggers=AimLogger("gpt", repo="runs"))
        fabric.log("loss", loss, step=step)
        fabric.logger.experiment.track(aim.Text(sample), name="sample", step=step)
    """

    extra = "aim"

    def __init__(
        self,
        name: str | None = None,
        version: str | None = None,
        repo: PathLike | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(name, version, prefix)
        self._repo = None if repo is None else str(repo)
        self._kwargs = kwargs

    @property
    @override
    def root_dir(self) -> str | None:
        """The repository, where it was given."""
        return self._repo

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        for name, value in as_flat_dict(params).items():
            self.experiment.set(("hparams", *name.split("/")), value, strict=False)

    @override
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        from aim import Run

        run = Run(self._version, repo=self._repo, experiment=self._name, **self._kwargs)
        self._version = run.hash

        def close(status: str) -> None:
            if run.meta_run_tree is not None:  # else the user has closed it
                run["status"] = status
            run.close()

        return run, close

    @override
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        for name, value in metrics.items():
            self.experiment.track(value, name=name, step=step)
