# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run."""

import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import finalize

from typing_extensions import Self

from fabric.checkpoint.access import Attempts
from fabric.checkpoint.background import SaveHandle
from fabric.checkpoint.keeping import checks
from fabric.checkpoint.keeping.attention import Attention
from fabric.checkpoint.keeping.catalogue import Catalogue
from fabric.checkpoint.keeping.folder import open_folder
from fabric.checkpoint.keeping.job import Job
from fabric.checkpoint.keeping.rules import Kept
from fabric.checkpoint.keeping.schedule import Schedule
from fabric.checkpoint.layouts import Format
from fabric.processes.held_signals import HeldSignals
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.types import PathLike

T = TypeVar("T")

# Signals with which schedulers announce that a job is about to end.
PREEMPTION = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class _Written(NamedTuple):
    step: int
    handle: SaveHandle


class CheckpointManager:
    """The checkpoints of one run in one folder: when they are written, which stay, and which to go on from.

    Make it after `fabric.launch()`, and call each method on every rank.

    It takes signals that announce the end of the job (SIGTERM, SIGUSR1), from when it is made until `close`. The next
    `save`, or, where steps are short, the one after it, then writes a checkpoint and sets `should_stop`, on all ranks
    together, whichever of them got the signal. `close`, or the end of the `with` block, lets the signal have its
    effect: `SystemExit` with the exit code 128 + n.

    Args:
        directory: A local folder or a URL that fsspec knows; rank 0's counts. A folder for one run.
        fabric: What saves and loads.
        keep_last: How many of the last checkpoints stay; None keeps all.
        keep_best: `(metric, "min")` or `(metric, "max")`: the best one stays too; `(metric, "min", 3)`: the best three.
        every: A checkpoint is due every so many steps, or every so much time by rank 0's clock.
        signals: Those to take; `()` for none. A handler of yours is called as before, and then has the last word.
        blocking: False lets a thread write, as in `fabric.save`. Others are removed once the new one is complete, and
            what a signal asks for is complete when `should_stop` is set. An error is raised by a later call, at the
            latest by the next one that writes, `restore` or `close`; the checkpoint is due again then.
        format: As in `fabric.save`.
        max_shard_size: As in `fabric.save`.
        checksum: As in `fabric.save`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If it makes no sense.

    Example::

        with CheckpointManager("runs/a", fabric=fabric, every=500, keep_last=3) as checkpoints:
            checkpoints.restore(state)
            for batch in loader:
                train_step(batch)
                state["step"] += 1
                checkpoints.save(state["step"], state)
                if checkpoints.should_stop:
                    break
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        fabric: Job,
        keep_last: int | None = None,
        keep_best: tuple[str, Literal["min", "max"]] | tuple[str, Literal["min", "max"], int] | None = None,
        every: int | timedelta = 1,
        signals: Iterable[int] = PREEMPTION,
        blocking: bool = True,
        format: Format | None = None,
        max_shard_size: int | str | None = None,
        checksum: bool = False,
    ) -> None:
        last = checks.validated_count(keep_last)
        self._best = checks.validated_best(keep_best)
        self._schedule = Schedule(checks.validated_interval(every))
        self._signals = HeldSignals(checks.validated_signals(signals))
        self._directory = fabric.broadcast(checks.validated_directory(directory))
        self._catalogue = Catalogue(open_folder(self._directory), last=last, best=self._best)
        self._job = fabric
        self._ranks = fabric.strategy
        self._blocking = blocking
        self._options: dict[str, Any] = {"format": format, "max_shard_size": max_shard_size, "checksum": checksum}
        self._written: _Written | None = None  # until it is complete, and others were removed
        self._attention = Attention(self._ranks)
        self._listens = bool(self._signals.signals) or self._schedule.by_time
        self._began = False
        self._saved: int | None = None
        self._owed = False  # until a checkpoint that is due is written, also where a first attempt fails
        self._stop = self._effect = 0  # the signal that all ranks know of, and that which is still to have its effect
        self._close = finalize(self, self._signals.uninstall)
        self._signals.install()

    @property
    def should_stop(self) -> bool:
        """Whether a signal ends the job, and its last checkpoint is written. Only `save` changes it."""
        return self._stop != 0

    # write

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any] | None = None, *, force: bool = False
    ) -> str | None:
        """Write a checkpoint if one is due, if a signal ends the job, or if `force` says so; then remove others.

        Call it after every step.

        Args:
            step: How many steps `state` has behind it; the same on all ranks, and never less than before.
            state: What `fabric.save` takes.
            metrics: Name to number, or tensor with one element; rank 0's count. Without any, this checkpoint is never
                one of the best.
            force: Write it though it is not due. A step that was just written is only written again with `metrics`.

        Returns:
            The path of the checkpoint, which with `blocking=False` is not complete yet; None where there was none to
            write.

        Raises:
            ValueError: On every rank, if the metric of `keep_best` is missing, or the folder holds a later step.
            OSError: On every rank, if it can't be written, or the last one could not be; the others are untouched.
        """
        checks.validate_step(step)
        checks.validate_metrics(metrics, self._best)
        self._begin(step)
        if self._is_complete() and self._ranks.is_global_zero:
            self._finish()
        due = self._schedule.reaches(step) or force
        due = self._hears_of_something() or due
        if due or self._stop or self._owed:
            self._finish(and_go_on=self._stop != 0)
        due = due or self._owed
        self._owed = due and not (step == self._saved and metrics is None)
        return self._write(step, state, metrics or {}) if self._owed else None

    def _begin(self, step: int) -> None:
        """At the first step of a run: in the folder of another one, `latest` and pruning would choose wrongly."""
        if self._began:
            return
        latest = self._on_rank_zero(self._catalogue.latest)
        if latest is not None and latest.step > step:
            raise ValueError(
                f"`CheckpointManager.save({step}, ...)`: `{self._directory}` holds a later checkpoint, of step"
                f" {latest.step}, so that `latest()` would not go on from this run. Call `restore(state)` first to go"
                " on from there, or give this run a folder of its own."
            )
        self._began = True

    def _hears_of_something(self) -> bool:
        """Whether the clock or a signal, on whichever rank, asks for a checkpoint."""
        if not self._listens:
            return False
        news = (bool(self._signals.received) and not self._stop) or self._has_failed()
        by_clock = self._ranks.is_global_zero and self._schedule.time_is_up()
        return self._attention.ask(news or by_clock) and self._exchange(by_clock)

    def _exchange(self, by_clock: bool = False) -> bool:
        """Tell each other what it is. Some vote has said that there is something; it may be known by now."""
        own = (self._signals.received, self._signals.effect, by_clock, self._has_failed())
        answers = self._ranks.gather_objects(own)
        known = self._stop
        self._stop, self._effect = next((answer[:2] for answer in answers if answer[0]), (0, 0))
        return answers[0][2] or self._stop != known or any(answer[3] for answer in answers)

    def _write(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        path = self._on_rank_zero(lambda: self._catalogue.announce(step, checks.numbers(metrics)))
        blocking = self._blocking or self._stop != 0
        try:
            handle = self._job.save(path, state, blocking=blocking, **self._options)
        except Exception:
            self._withdraw(step)
            raise
        self._schedule.saved(step)
        self._saved, self._owed = step, False
        self._written = _Written(step, handle)
        if blocking:
            self._finish()
        return path

    def _is_complete(self) -> bool:
        """Whether the last one is, and has not been followed up."""
        written = self._written
        return written is not None and written.handle.done() and written.handle.error is None

    def _has_failed(self) -> bool:
        written = self._written
        return written is not None and written.handle.done() and written.handle.error is not None

    def _finish(self, *, and_go_on: bool = False) -> None:
        """Wait for what a thread writes, and remove others, or raise its error. Each rank for itself.

        Args:
            and_go_on: Whether a later checkpoint is written now in any case, so that an error is only a warning.
        """
        written, self._written = self._written, None
        if written is None:
            return
        written.handle.wait()
        error = written.handle.error
        if error is None:
            if self._ranks.is_global_zero:
                self._prune(written.step)
            return
        self._withdraw(written.step)
        self._saved, self._owed = None, True
        if and_go_on:
            with suppress(Exception):
                written.handle.result()  # or the next save would raise it
            rank_zero_warn(f"`CheckpointManager` could not write the checkpoint of step {written.step}: {error}.")
        elif not written.handle.is_told:  # by another call of `fabric.save` or `fabric.load`
            written.handle.result()

    def _withdraw(self, step: int) -> None:
        if self._ranks.is_global_zero:
            with suppress(Exception):
                self._catalogue.withdraw(step)

    def _prune(self, newest: int) -> None:
        """What can't be removed now is tried again after the next save; the training goes on."""
        try:
            self._catalogue.prune(newest)
        except Exception as error:
            rank_zero_warn(f"`CheckpointManager` could not remove old checkpoints of `{self._directory}`: {error}.")

    # find and read

    def latest(self) -> str | None:
        """The path of the complete checkpoint with the highest step; None where there is none."""
        self._follow_up()
        return _path(self._on_rank_zero(self._catalogue.latest))

    def best(self) -> str | None:
        """The path of the best checkpoint by the metric of `keep_best`; None where none has it."""
        checks.validate_has_best(self._best)
        self._follow_up()
        return _path(self._on_rank_zero(self._catalogue.best))

    def kept(self) -> list[Kept]:
        """All complete checkpoints, in the order of steps: `step`, `path`, `metrics`."""
        self._follow_up()
        return self._on_rank_zero(self._catalogue.all)

    def _follow_up(self) -> None:
        """What is complete, or has failed, by now; without waiting for it."""
        if not self._blocking and self._on_rank_zero(lambda: self._written is None or self._written.handle.done()):
            self._finish()

    def restore(
        self,
        state: dict[str, Any],
        which: Literal["latest", "best"] | int = "latest",
        *,
        strict: bool = True,
        weights_only: bool = True,
    ) -> dict[str, Any] | None:
        """Load a checkpoint as `fabric.load` does. While it is read, no `CheckpointManager` removes it.

        Args:
            state: The objects to restore, in place.
            which: `"latest"`, `"best"`, or the number of a step.
            strict: As in `fabric.load`.
            weights_only: As in `fabric.load`.

        Returns:
            What the checkpoint holds beyond `state`; None, on every rank, where there is no checkpoint.

        Raises:
            ValueError: On every rank, if there are checkpoints but not of that step.
        """
        checks.validate_choice(which, self._best)
        self._finish()
        with ExitStack() as stack:
            chosen = self._on_rank_zero(lambda: stack.enter_context(self._catalogue.reading(which)))
            if chosen is None:
                return None
            remainder = self._job.load(chosen.path, state, strict, weights_only)
        self._schedule.saved(chosen.step)
        return remainder

    def _on_rank_zero(self, function: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank: not each sees the same state of a file system at the same time."""
        attempts, found = Attempts(), None
        with attempts:
            if self._ranks.is_global_zero:
                found = function()
        return attempts.agree(self._ranks, found)[0]  # type: ignore[return-value]

    # end

    def close(self) -> None:
        """Wait for what is being written, and give the signals back.

        A signal that came has its effect now: `SystemExit` with the exit code 128 + n.

        Call it on every rank; the end of a `with` block does, and leaves an exception that ends the block as it is.
        """
        if not self._close.alive:
            return
        if self._attention.unread():
            self._exchange()
        try:
            self._finish()
        finally:
            self._close()
        effect = self._effect or self._signals.effect
        if effect:
            raise SystemExit(128 + effect)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._attention.forget()
            self._close()


def _path(kept: Kept | None) -> str | None:
    return None if kept is None else kept.path
