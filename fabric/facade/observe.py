# SPDX-License-Identifier: Apache-2.0
"""Watching a run: loggers, callbacks, progress, profiles."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module

from fabric import watching
from fabric.callbacks import Callbacks
from fabric.facade.identity import Identity
from fabric.loggers import Logger
from fabric.loggers.reduced import MetricsReduce, reduced
from fabric.utilities.apply_func import convert_tensors_to_scalars
from fabric.utilities.types import PathLike
from fabric.wrappers import _unwrap_objects


class Observe(Identity):
    """Loggers, callbacks, and what is shown of the run."""

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

    def log(self, name: str, value: Any, step: int | None = None, *, reduce: MetricsReduce | None = None) -> None:
        """Send one number (or a tensor with one element) to every logger; see `log_dict`."""
        self.log_dict({name: value}, step, reduce=reduce)

    def log_dict(
        self, metrics: Mapping[str, Any], step: int | None = None, *, reduce: MetricsReduce | None = None
    ) -> None:
        """Send numbers by name to every logger.

        Args:
            metrics: Name to number, or tensor with one element.
            step: When they were measured.
            reduce: `mean`, `sum`, `min` or `max` over all ranks, which must all call, with the same names. By default
                nothing is reduced: the loggers write what rank 0 passes.

        Raises:
            ValueError: On every rank, if with `reduce` a value is not a number or the names differ.
        """
        if reduce is not None:
            self._require_launch("log_dict", reduce=reduce)
            metrics = reduced(metrics, reduce, self._strategy)
        if self._loggers:
            numbers = convert_tensors_to_scalars(metrics)
            for logger in self._loggers:
                logger.log_metrics(numbers, step)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method `hook_name` of each callback that has it, in their order."""
        self._callbacks.call(hook_name, *args, **kwargs)

    def progress(
        self,
        iterable: Iterable[Any] | None = None,
        *,
        total: int | None = None,
        description: str = "",
        unit: str = "it",
        samples: int | None = None,
        display: str = "auto",
    ) -> "watching.ProgressBar":
        """Go through `iterable` with a progress bar on rank 0's stderr; the other ranks just go through it.

        Args:
            iterable: What to go through. A set-up loader that was resumed starts at its place. None for a bar that
                `update` moves, in a `with` block.
            total: Number of items; by default `len(iterable)`, where it has one.
            description: Stands before the bar.
            unit: What an item is called.
            samples: Samples in an item over all ranks, for the samples per second; by default those of a set-up
                loader's batch times the number of data-parallel ranks. 0 leaves them out.
            display: `rich`, `tqdm` or `lines` (one now and then); `auto` takes rich, or tqdm, if it is installed and
                stderr is a terminal, else lines.

        Example::

            bar = fabric.progress(loader, description="epoch 0", unit="batch")
            for batch in bar:
                loss = train_step(batch)
                bar.show(loss=loss)
        """
        watching.validate_kind(display)
        if samples is None:
            samples = watching.samples_of(iterable, self._strategy.distributed_sampler_kwargs["num_replicas"])
        return watching.ProgressBar(
            iterable,
            total=total,
            description=description,
            unit=unit,
            samples=samples,
            display=self._screen.display(display) if self.is_global_zero else None,
        )

    def profile(
        self,
        directory: PathLike,
        *,
        wait: int = 0,
        warmup: int | None = None,
        active: int | None = None,
        repeat: int = 1,
        skip_first: int = 0,
        rows: int = 15,
        compress: bool = False,
        **options: Any,
    ) -> "watching.Profile":
        """Record the block with `torch.profiler` on every rank; enter and leave it on all of them.

        Each rank writes a Chrome trace, `rank0.json` and so on (`rank0-cycle1.json` for the second cycle). At the end
        rank 0 prints the top operators of the last cycle, and what each rank lost in communication in it. What was
        recorded is written too where the block ends early, by `break` or an exception; after an exception there is no
        table.

        Args:
            directory: Where the traces go: a local folder, or a URL that fsspec knows.
            wait: Steps at the start of each cycle in which nothing happens.
            warmup: Steps after them that are recorded and thrown away; by default 1 with `active`.
            active: Steps after them that are recorded; call `step()` at the end of each step. None records the whole
                block.
            repeat: Cycles; 0 goes on until the end.
            skip_first: Steps before the first cycle.
            rows: Operators in the table.
            compress: Write `.json.gz`.
            **options: Further arguments of `torch.profiler.profile`, such as `record_shapes`, `profile_memory`,
                `with_stack`, `with_flops`, and `activities` (by default the CPU and the kind of the device).

        Raises:
            ValueError: If the steps do not fit together.
            RuntimeError: On every rank at the end, if one could not write.

        Example::

            with fabric.profile("traces", wait=1, active=3) as profile:
                for batch in loader:
                    train_step(batch)
                    profile.step()
        """
        self._require_launch("profile")
        return watching.Profile(
            directory,
            strategy=self._strategy,
            screen=self._screen,
            schedule=watching.validated_schedule(
                wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first
            ),
            rows=rows,
            compress=compress,
            **options,
        )

    def summary(self, model: Module, depth: int = 1, *, optimizer_values: int = 2) -> "watching.Summary":
        """What a model is made of, and the memory that training it takes on each device.

        Args:
            model: A module, set up or not. One that is sharded shows what this rank holds.
            depth: Levels of modules that get a row; -1 for all.
            optimizer_values: Values that the optimizer keeps for each trained parameter: 2 for Adam, 1 for SGD with
                momentum, 0 for SGD.

        Returns:
            The numbers; as text, a table.

        Example::

            fabric.print(fabric.summary(model))
        """
        return watching.summarize(
            _unwrap_objects(model), depth=depth, ranks=self.world_size, optimizer_values=optimizer_values
        )
