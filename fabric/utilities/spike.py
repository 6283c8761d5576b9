# SPDX-License-Identifier: Apache-2.0
"""Noticing, on all ranks together, that the loss jumps away from where it was."""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from fabric.utilities.cloud_io import split_url
from fabric.utilities.types import PathLike


@dataclass(frozen=True)
class Spike:
    """A batch whose loss was out of line on at least one rank.

    Attributes:
        batch_idx: The index that the loop gave to the batch.
        epoch: The epoch of the loader, where it was passed.
        position: Batches that the loader had yielded in that epoch before this one, where it was passed.
    """

    batch_idx: int
    epoch: int | None = None
    position: int | None = None


class TrainingSpikeError(RuntimeError):
    """The loss has spiked.

    Attributes:
        spike: Where.
        batch_idx: The index of the batch.
    """

    def __init__(self, message: str, spike: Spike) -> None:
        super().__init__(message)
        self.spike = spike
        self.batch_idx = spike.batch_idx

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.spike)


TrainingSpikeException = TrainingSpikeError


class _Strategy(Protocol):
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool: ...
    def gather_objects(self, obj: Any) -> list[Any]: ...
    def broadcast(self, obj: Any) -> Any: ...


class _Fabric(Protocol):
    @property
    def strategy(self) -> Any: ...
    @property
    def is_global_zero(self) -> bool: ...


class SpikeDetection:
    """Compares each loss with the mean of the last ones. One rank's spike is everybody's.

    A callback of Fabric's, or called directly; every rank calls it at every batch. A spike is noted in `spikes`, and in
    the file `exclude_batches_path`, and then raises on all ranks (or calls `on_spike`). A loss that spikes does not
    count for the mean.

    Args:
        mode: `min` for a value that should fall, so that a spike goes up; `max` for one that should rise.
        window: Losses that the mean is over.
        warmup: Batches at the start that can't spike, but by NaN or infinity.
        atol: A spike is off the mean by at least this; None leaves the condition out.
        rtol: A spike is off the mean by at least this times the mean; None leaves the condition out. With both given,
            both must hold; one must be given.
        exclude_batches_path: A JSON file (local, or an fsspec URL) that rank 0 adds the spikes to.
        finite_only: NaN and infinity are spikes, in the warm-up too; False passes over them.
        on_spike: Called on every rank with the `Spike`, in the place of raising.

    Example::

        fabric = Fabric(callbacks=SpikeDetection(window=100, warmup=50, exclude_batches_path="spikes.json"))
        ...
        fabric.call("on_train_batch_end", fabric=fabric, loss=loss, batch=batch, batch_idx=i, loader=loader)

        # The job that is started after it goes on from a checkpoint before the spike, and leaves the batch out.
        detection.load_spikes(fabric)
        for i, batch in enumerate(loader):
            if detection.skips(i, loader):
                continue
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: PathLike | None = None,
        finite_only: bool = True,
        *,
        on_spike: Callable[[Spike], Any] | None = None,
    ) -> None:
        _validate(mode, window, atol, rtol)
        self.mode = mode
        self.warmup = warmup
        self.atol = atol
        self.rtol = rtol
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self.on_spike = on_spike
        self.spikes: list[Spike] = []
        self._recent: deque[float] = deque(maxlen=window)
        self._seen = 0

    @property
    def bad_batches(self) -> list[int]:
        """The indices of the batches that spiked."""
        return [spike.batch_idx for spike in self.spikes]

    def on_train_batch_end(
        self, fabric: _Fabric, loss: Tensor | float, batch: Any = None, batch_idx: int = 0, loader: Any = None
    ) -> None:
        """Look at the loss of a batch; collective, one agreement over the ranks. A loss on a GPU is waited for.

        Args:
            fabric: The launched `Fabric`.
            loss: This rank's loss, one number.
            batch: The batch (not used; it is there for the name of the hook).
            batch_idx: The index of the batch.
            loader: The set-up loader that it came from, so that its place is noted too.

        Raises:
            TrainingSpikeError: On all ranks, if the loss has spiked on one and there is no `on_spike`.
            ValueError: If the loss is a tensor with more or less than one element.
        """
        value = _number(loss)
        strategy: _Strategy = fabric.strategy
        if strategy.reduce_boolean_decision(self._is_spike(value), all=False):
            self._handle(fabric, value, batch_idx, loader)
            return
        self._seen += 1
        if math.isfinite(value):
            self._recent.append(value)

    def _is_spike(self, value: float) -> bool:
        if not math.isfinite(value):
            return self.finite_only
        if self._seen < self.warmup or not self._recent:
            return False
        mean = self._mean()
        off = value - mean if self.mode == "min" else mean - value
        return off > 0 and off >= (self.atol or 0.0) and off >= (self.rtol or 0.0) * abs(mean)

    def _mean(self) -> float:
        return math.fsum(self._recent) / len(self._recent) if self._recent else math.nan

    def _handle(self, fabric: _Fabric, value: float, batch_idx: int, loader: Any) -> None:
        strategy: _Strategy = fabric.strategy
        spike = _place(batch_idx, loader)
        self.spikes.append(spike)
        ranks = strategy.gather_objects((self._is_spike(value), value, self._mean()))
        error = strategy.broadcast(self._write() if fabric.is_global_zero else None)
        if error is not None:
            raise RuntimeError(f"The spike in batch {batch_idx} could not be noted in the file: {error}")
        if self.on_spike is not None:
            self.on_spike(spike)
            return
        described = [f"rank {n}: {loss:.6g}, mean {mean:.6g}" for n, (bad, loss, mean) in enumerate(ranks) if bad]
        raise TrainingSpikeError(
            f"The loss has spiked in batch {batch_idx} ({'; '.join(described)}). Go on from a checkpoint before it and"
            " leave the batch out: `SpikeDetection.skips(batch_idx)` says when.",
            spike,
        )

    # leaving batches out

    def skips(self, batch_idx: int, loader: Any = None) -> bool:
        """Whether this batch has spiked before.

        Args:
            batch_idx: The index of the batch.
            loader: The set-up loader that has just yielded it: then its place decides, not the index.
        """
        if loader is None:
            return batch_idx in self.bad_batches
        place = _place(batch_idx, loader)
        return any((spike.epoch, spike.position) == (place.epoch, place.position) for spike in self.spikes)

    def load_spikes(self, fabric: _Fabric) -> None:
        """Take over what `exclude_batches_path` holds, if the file is there: rank 0 reads it for all; collective.

        Raises:
            RuntimeError: On every rank, if the file can't be read.
        """
        strategy: _Strategy = fabric.strategy
        found, error = strategy.broadcast(self._read() if fabric.is_global_zero else None)
        if error is not None:
            raise RuntimeError(f"`SpikeDetection.load_spikes(...)` can't read `{self.exclude_batches_path}`: {error}")
        self.spikes += [spike for spike in found if spike not in self.spikes]

    def _read(self) -> tuple[list[Spike], str | None]:
        if self.exclude_batches_path is None:
            return [], None
        try:
            filesystem, path = split_url(self.exclude_batches_path)
            if not filesystem.exists(path):
                return [], None
            with filesystem.open(path, "r") as file:
                return [Spike(**entry) for entry in json.load(file)], None
        except (OSError, ValueError, TypeError, ImportError) as error:
            return [], f"{type(error).__name__}: {error}"

    def _write(self) -> str | None:
        """Add to the file; the error, if there is one, for the other ranks."""
        if self.exclude_batches_path is None:
            return None
        earlier, error = self._read()
        if error is not None:
            return error
        spikes = earlier + [spike for spike in self.spikes if spike not in earlier]
        try:
            filesystem, path = split_url(self.exclude_batches_path)
            filesystem.makedirs(filesystem._parent(path), exist_ok=True)
            temporary = f"{path}.tmp"
            with filesystem.open(temporary, "w") as file:
                json.dump([asdict(spike) for spike in spikes], file, indent=1)
            filesystem.mv(temporary, path)
        except OSError as failure:
            return f"{type(failure).__name__}: {failure}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """The losses of the window, the number of batches seen, and the spikes."""
        return {
            "recent": list(self._recent),
            "seen": self._seen,
            "spikes": [asdict(spike) for spike in self.spikes],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; spikes that were noted meanwhile stay."""
        self._recent = deque(state_dict["recent"], maxlen=self._recent.maxlen)
        self._seen = state_dict["seen"]
        saved = [Spike(**entry) for entry in state_dict["spikes"]]
        self.spikes = saved + [spike for spike in self.spikes if spike not in saved]


def _validate(mode: str, window: int, atol: float | None, rtol: float | None) -> None:
    if mode not in ("min", "max"):
        raise ValueError(f"`SpikeDetection(mode={mode!r})` is not known. Choose `min` or `max`.")
    if window < 1:
        raise ValueError(f"`SpikeDetection(window={window})` holds no loss. Write 1 or more.")
    if atol is None and rtol is None:
        raise ValueError(
            "`SpikeDetection(atol=None, rtol=None)` has nothing to tell a spike by. Give one of them, or both."
        )
    for name, value in (("atol", atol), ("rtol", rtol)):
        if value is not None and value < 0:
            raise ValueError(f"`SpikeDetection({name}={value})` is negative. Write 0 or more, or None.")


def _number(loss: Tensor | float) -> float:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(
            f"`SpikeDetection` needs one number, but got a loss of shape {tuple(loss.shape)}."
            " Reduce it first, for example with `.mean()`."
        )
    return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)


def _place(batch_idx: int, loader: Any) -> Spike:
    """The batch that `loader` has yielded last."""
    if loader is None:
        return Spike(batch_idx)
    epoch, position = loader.place
    return Spike(batch_idx, epoch=epoch, position=position - 1)
