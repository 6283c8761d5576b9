# SPDX-License-Identifier: Apache-2.0
"""What a logger is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module


class Logger(ABC):
    """Takes the numbers of a run. `Fabric(loggers=...)` takes one or several, and `fabric.log` reaches all.

    Fabric calls the methods on every rank; a logger writes on global rank 0 only (see `rank_zero_only`). A subclass
    implements the first four; the others have a default.

    Example:
        >>> from fabric.utilities.rank_zero import rank_zero_only
        >>> class PrintLogger(Logger):
        ...     name, version = "print", 0
        ...     @rank_zero_only
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, dict(metrics))
        ...     @rank_zero_only
        ...     def log_hyperparams(self, params):
        ...         print(params)
        >>> PrintLogger().log_metrics({"loss": 0.5}, step=3)
        3 {'loss': 0.5}
    """

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Which run of the experiment this is."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers.

        Args:
            metrics: Name to number (a Python number, or a tensor of one element).
            step: When they were measured; the logger counts for itself where it is not given.
        """

    @abstractmethod
    def log_hyperparams(self, params: Any) -> None:
        """Record what the run was started with.

        Args:
            params: A mapping, an `argparse.Namespace` or a dataclass instance.
        """

    @property
    def root_dir(self) -> str | None:
        """The folder that holds all experiments; None for a logger that keeps no files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this run; None for a logger that keeps no files."""
        return None

    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:
        """Record the graph of a model. Loggers that have no place for it do nothing.

        Args:
            model: The model.
            input_array: An example input of the model.
        """

    def save(self) -> None:
        """Write out what is still held back. It may be called at any time, any number of times."""

    def finalize(self, status: str) -> None:
        """The run is over: write out what is held back and let go of files and connections.

        Fabric calls it at the end of a script that launched, and when a launched function fails. It may be called
        again, and a logger may be used again after it.

        Args:
            status: How it ended, `"success"` or `"failed"`.
        """
        self.save()
