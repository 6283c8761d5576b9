# SPDX-License-Identifier: Apache-2.0
"""Metrics, histograms, texts, hyperparameters and graphs for TensorBoard."""

import os
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from fabric.loggers.client import ClientLogger
from fabric.loggers.run_folder import RunFolder
from fabric.loggers.values import as_flat_dict, as_number, as_numbers, prefixed
from fabric.utilities.rank_zero import rank_zero_only
from fabric.utilities.types import PathLike
from fabric.wrappers import _unwrap_objects


class TensorBoardLogger(ClientLogger):
    """Writes event files into `root_dir/name/version/sub_dir`, on global rank 0.

    `experiment` is the `torch.utils.tensorboard.SummaryWriter`. Events are on disk 10 seconds after the first of them
    at the latest (see `flush_secs`), at `save`, `finalize` and the end of the process. A version that exists is
    continued in a further event file of the same folder, as TensorBoard wants it.

    Args:
        root_dir: Folder that holds all experiments, or a URL that TensorBoard can write to (`s3://...`, or what else
            fsspec knows).
        name: Name of the experiment; with `""` or None the versions lie in `root_dir` itself.
        version: A number `n` (folder `version_n`) or the name of the folder. By default the first number above those
            that exist; see `CSVLogger`.
        default_hp_metric: Whether hyperparameters that come without metrics get `hp_metric`, -1 until it is logged, as
            their result in TensorBoard's table of runs.
        prefix: Put before the name of each metric, with a `-` between.
        sub_dir: Folder below that of the version, for several writers of one run.
        **kwargs: For `SummaryWriter`, such as `flush_secs` (10 by default here), `max_queue`, `purge_step`.

    Raises:
        ModuleNotFoundError: If `tensorboard` is not installed.
        ValueError: If a metric is not a number, or a mapping of numbers.

    Example::

        fabric = Fabric(loggers=TensorBoardLogger("runs", name="gpt"))
        fabric.log("loss", loss, step=step)
        fabric.logger.log_histogram("weights", model.weight, step=step)
    """

    extra = "tensorboard"

    def __init__(
        self,
        root_dir: PathLike,
        name: str | None = "fabric_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: PathLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(prefix=prefix)
        self._folder = RunFolder(root_dir, name, version)
        self._default_hp_metric = default_hp_metric
        self._sub_dir = os.fspath(sub_dir or "")
        self._kwargs = {"flush_secs": 10, **kwargs}

    @property
    @override
    def name(self) -> str:
        return self._folder.name

    @property
    @override
    def version(self) -> int | str:
        return self._folder.version

    @property
    @override
    def root_dir(self) -> str:
        return self._folder.root_dir

    @property
    @override
    def log_dir(self) -> str:
        """The folder of the event files. It exists once something was written."""
        return self._below(self._folder.path)

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers; a mapping of numbers becomes one chart of several lines.

        Args:
            metrics: Name to number or to a mapping of numbers.
            step: When they were measured; by default one more than at the last call.
        """
        scalars = {name: _scalar(name, value) for name, value in metrics.items()}
        self._send({prefixed(name, self._prefix): value for name, value in scalars.items()}, step)

    @override
    @rank_zero_only
    def log_hyperparams(
        self, params: Any, metrics: Mapping[str, Any] | float | None = None, step: int | None = None
    ) -> None:
        """Record what the run was started with, for TensorBoard's table of runs.

        Args:
            params: A mapping, an `argparse.Namespace` or a dataclass instance; nested ones are flattened.
            metrics: Name to number: the columns of results in that table; a number alone is named `hp_metric`. Log the
                same names later to update them.
            step: When these were measured.
        """
        from torch.utils.tensorboard.summary import hparams

        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        named = metrics if isinstance(metrics, Mapping) else {"hp_metric": metrics}
        numbers = as_numbers(named, self._prefix)
        writer = self.experiment._get_file_writer()
        for summary in hparams(as_flat_dict(params), numbers):
            writer.add_summary(summary, step)
        for name, value in numbers.items():
            self.experiment.add_scalar(name, value, step)

    @rank_zero_only
    def log_histogram(self, name: str, values: Any, step: int | None = None) -> None:
        """Record how numbers are distributed.

        Args:
            name: Its name.
            values: A tensor or array of any shape.
            step: When they were taken.
        """
        values = values.detach().float() if isinstance(values, Tensor) else values
        self.experiment.add_histogram(name, values, step)

    @rank_zero_only
    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Record a text, which TensorBoard shows as Markdown."""
        self.experiment.add_text(name, text, step)

    @rank_zero_only
    def log_image(self, name: str, image: Any, step: int | None = None, dataformats: str = "CHW") -> None:
        """Record an image.

        Args:
            name: Its name.
            image: A tensor or array: floats in `[0, 1]` or `uint8`.
            step: When it was made.
            dataformats: What its dimensions are: `CHW`, `HWC`, `HW`, or `NCHW` for several at once.
        """
        add = self.experiment.add_images if "N" in dataformats else self.experiment.add_image
        add(name, image, step, dataformats=dataformats)

    @rank_zero_only
    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        """Record a matplotlib figure."""
        self.experiment.add_figure(name, figure, step)

    @override
    @rank_zero_only
    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:
        """Record the graph of the user's own module, which is run once without gradients.

        Args:
            model: The module, set up or not.
            input_array: An example input, or a tuple of them; by default the model's `example_input_array`.

        Raises:
            ValueError: If there is no example input.
        """
        plain = _unwrap_objects(model)
        inputs = getattr(plain, "example_input_array", None) if input_array is None else input_array
        if inputs is None:
            raise ValueError(
                "`log_graph(model)` runs the model once and needs an example input."
                " Write `log_graph(model, input_array=batch)`."
            )
        inputs = tuple(_as_parameters(plain, x) for x in (inputs if isinstance(inputs, tuple) else (inputs,)))
        with torch.no_grad(), warnings.catch_warnings():
            # TensorBoard's graphs come from `torch.jit.trace`, of which PyTorch warns.
            warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is (deprecated|not supported)")
            self.experiment.add_graph(plain, inputs)

    @override
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(self._below(self._folder.make()), **self._kwargs)
        return writer, lambda status: writer.close()

    @override
    def _flush(self, client: Any) -> None:
        client.flush()

    @override
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        step = self._counted(step)
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                self.experiment.add_scalars(name, value, step)
            else:
                self.experiment.add_scalar(name, value, step)

    def _below(self, folder: str) -> str:
        separator = os.sep if self._folder.is_local else "/"
        return separator.join(part for part in (folder, self._sub_dir) if part)


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {inner: _scalar(f"{name}/{inner}", number) for inner, number in value.items()}
    number = as_number(name, value)
    if not isinstance(number, Real):
        raise ValueError(
            f"`TensorBoardLogger.log_metrics` got a `{type(value).__name__}` for `{name}`, which is not a number."
            " Write `log_text` for a text, `log_histogram` for an array."
        )
    return number


def _as_parameters(module: Module, value: Any) -> Any:
    """An input where the parameters are and, if it is floating, in their dtype."""
    parameter = next(module.parameters(), None)
    if parameter is None or not isinstance(value, Tensor):
        return value
    return value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)
