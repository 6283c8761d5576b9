# SPDX-License-Identifier: Apache-2.0
"""How fast a loop goes: batches, samples, tokens and floating-point operations per second."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from fabric.utilities.device_memory import device_memory
from fabric.utilities.peak_flops import get_available_flops

__all__ = ["Throughput", "ThroughputMonitor", "get_available_flops", "measure_flops"]


@dataclass(frozen=True)
class _Reading:
    """What had been done up to `time`; `flops` since the reading before it."""

    time: float
    batches: int
    samples: int
    lengths: int | None
    flops: int | None


class Throughput:
    """Rates of one device over a window of the last readings, and those of all devices.

    Args:
        available_flops: The peak of one device in operations per second, for the `mfu` (model flops utilisation:
            achieved over peak); None leaves it out. See `get_available_flops`.
        world_size: Number of devices. With more than one, the rates of all together are given too: this device's times
            their number.
        window_size: Readings that are kept; the rates are those between the oldest and the newest, at least 2.
        separator: Stands between `device` and the name of a rate.

    Raises:
        ValueError: For a window of fewer than 2 readings.

    Example:
        >>> throughput = Throughput(window_size=10)
        >>> for step in range(1, 4):
        ...     throughput.update(time=2.0 * step, batches=step, samples=32 * step)
        >>> throughput.compute()["device/samples_per_sec"]
        16.0
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        if window_size < 2:
            raise ValueError(
                f"`{type(self).__name__}(window_size={window_size})` can't tell a rate, which needs two readings."
                " Write `window_size=2` or more."
            )
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        self._readings: deque[_Reading] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Note what this device has done. Take the time when the work is done: a GPU computes on after a step returns.

        Args:
            time: Seconds since any fixed moment.
            batches: Batches so far.
            samples: Samples so far.
            lengths: Items in the samples so far, such as tokens; at every call or at none.
            flops: Operations since the last call, by `measure_flops`; at every call or at none.

        Raises:
            ValueError: If a number is below that of the last call, or one of the last two comes at some calls only.
        """
        reading = _Reading(time, batches, samples, lengths, flops)
        self._validate(reading)
        self._readings.append(reading)

    def _validate(self, new: _Reading) -> None:
        call = f"`{type(self).__name__}.update(...)`"
        if new.samples < new.batches:
            raise ValueError(
                f"{call} got `samples={new.samples}` and `batches={new.batches}`, but a batch has a sample at least."
                " Pass the numbers since the start, not those of the last batch."
            )
        if not self._readings:
            return
        last = self._readings[-1]
        for name in ("lengths", "flops"):
            if (getattr(last, name) is None) != (getattr(new, name) is None):
                raise ValueError(f"{call} got `{name}` at some calls and not at others. Pass it at every call.")
        for name in ("time", "batches", "samples", "lengths"):
            before, now = getattr(last, name), getattr(new, name)
            if now is not None and now < before:
                raise ValueError(
                    f"{call} got `{name}={now}` after `{name}={before}`. Pass what has come together since the start,"
                    " which does not fall; call `reset()` to start anew."
                )

    def compute(self) -> dict[str, float]:
        """The newest reading (`time`, `batches`, `samples`, `lengths`) and, from two readings on, the rates.

        Returns:
            `device/batches_per_sec`, `device/samples_per_sec`, and where they are known `device/items_per_sec` (by the
            lengths), `device/flops_per_sec` and `device/mfu`; of all devices the same without `device/` (not the mfu).
        """
        metrics: dict[str, float] = {}
        if self._readings:
            last = self._readings[-1]
            metrics = {"time": last.time, "batches": last.batches, "samples": last.samples}
            metrics |= {} if last.lengths is None else {"lengths": last.lengths}
        rates = self._rates()
        metrics |= {f"device{self.separator}{name}": rate for name, rate in rates.items()}
        if self.world_size > 1:
            metrics |= self._of_all_devices(rates)
        if self.available_flops and "flops_per_sec" in rates:
            metrics[f"device{self.separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        return metrics

    def _rates(self) -> dict[str, float]:
        if len(self._readings) < 2 or self._readings[-1].time == self._readings[0].time:
            return {}
        first, last = self._readings[0], self._readings[-1]
        elapsed = last.time - first.time
        done: dict[str, float] = {"batches": last.batches - first.batches, "samples": last.samples - first.samples}
        if first.lengths is not None and last.lengths is not None:
            done["items"] = last.lengths - first.lengths
        if last.flops is not None:
            done["flops"] = sum(after.flops or 0 for _, after in pairwise(self._readings))
        return {f"{name}_per_sec": amount / elapsed for name, amount in done.items()}

    def _of_all_devices(self, rates: Mapping[str, float]) -> dict[str, float]:
        return {name: rate * self.world_size for name, rate in rates.items()}

    def reset(self) -> None:
        """Forget all readings, for example after an evaluation that should not count."""
        self._readings.clear()


class _Strategy(Protocol):
    @property
    def distributed_sampler_kwargs(self) -> Mapping[str, int]: ...
    def gather_objects(self, obj: Any) -> list[Any]: ...


class _Precision(Protocol):
    @property
    def precision(self) -> str: ...


class _Fabric(Protocol):
    """What the monitor needs of `Fabric`."""

    @property
    def device(self) -> torch.device: ...
    @property
    def world_size(self) -> int: ...
    @property
    def strategy(self) -> Any: ...
    @property
    def precision(self) -> Any: ...
    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None: ...


class ThroughputMonitor(Throughput):
    """A `Throughput` that knows the device's peak and the number of ranks from Fabric, and logs.

    Args:
        fabric: The launched `Fabric`.
        over_ranks: False multiplies this rank's rates by the number of ranks, without talking to them. True adds up
            what each rank measured, for ranks that differ (samples of different lengths); then `compute` and
            `compute_and_log` are collective: call them on every rank.
        memory: Add `device/memory_allocated`, `..._reserved` and `..._peak`, in bytes (see `device_memory`).
        **kwargs: `window_size` and `separator`; `available_flops` for a device that the table doesn't have.

    Example::

        throughput = ThroughputMonitor(fabric, window_size=50)
        start = time.perf_counter()
        for step, batch in enumerate(loader, 1):
            train_step(batch)
            if step % 10 == 0:
                throughput.update(time=time.perf_counter() - start, batches=step, samples=step * batch_size)
                throughput.compute_and_log(step)
    """

    def __init__(self, fabric: _Fabric, *, over_ranks: bool = False, memory: bool = False, **kwargs: Any) -> None:
        if "available_flops" not in kwargs:
            arithmetic = _arithmetic_of(fabric.precision)
            kwargs["available_flops"] = arithmetic and get_available_flops(fabric.device, arithmetic)
        super().__init__(**{"world_size": fabric.world_size, **kwargs})
        self._fabric = fabric
        self._over_ranks = over_ranks
        self._memory = memory
        self.step = -1

    def compute(self) -> dict[str, float]:
        """The metrics of `Throughput.compute`, and the device's memory where asked for."""
        metrics = super().compute()
        if self._memory:
            held = device_memory(self._fabric.device)
            metrics |= {f"device{self.separator}memory_{name}": size for name, size in held.items()}
        return metrics

    def _of_all_devices(self, rates: Mapping[str, float]) -> dict[str, float]:
        strategy: _Strategy = self._fabric.strategy
        ranks = strategy.gather_objects(dict(rates)) if self._over_ranks else [dict(rates)] * self.world_size
        names = [name for name in rates if all(name in rank for rank in ranks)]
        totals = {name: sum(rank[name] for rank in ranks) for name in names}
        # The ranks of one tensor-parallel group all report the same data; their operations are their own.
        alike = self._fabric.world_size / strategy.distributed_sampler_kwargs["num_replicas"]
        return {name: total if name == "flops_per_sec" else total / alike for name, total in totals.items()}

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, float]:
        """Compute the metrics and send them through `fabric.log_dict`.

        Args:
            step: The step to log at; by default the number of calls so far.
            **kwargs: Further metrics to log with them.

        Returns:
            What was logged.
        """
        self.step = self.step + 1 if step is None else step
        metrics = {**self.compute(), **kwargs}
        self._fabric.log_dict(metrics, step=self.step)
        return metrics


def _arithmetic_of(precision: _Precision) -> torch.dtype | str | None:
    """In what the matrix products run under a precision; None for one that is not known."""
    name = precision.precision
    if name.startswith(("transformer-engine", "float8")):
        return "fp8"
    kinds = {"64": "fp64", "bf16": "bf16", "16": "fp16"}
    width = name.split("-")[0]
    return torch.float32 if width == "32" else kinds.get(width)


def measure_flops(
    model: Module,
    forward_fn: Callable[[], Tensor],
    loss_fn: Callable[[Tensor], Tensor] | None = None,
) -> int:
    """Count the floating-point operations of one forward, and with `loss_fn` of the backward too.

    Matrix products, convolutions and attention are counted, a multiplication and an addition as two. On the meta device
    nothing is computed or allocated, so any model can be counted on any machine. Gradients are left as they were.

    Args:
        model: The model that `forward_fn` calls.
        forward_fn: Runs one forward and returns its output.
        loss_fn: Makes a loss of the output, which `backward` is then called on.

    Example:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(32, 16)
        ...     x = torch.randn(8, 32)
        >>> measure_flops(model, lambda: model(x))
        8192
        >>> measure_flops(model, lambda: model(x), lambda y: y.sum())
        16384
    """
    from torch.utils.flop_counter import FlopCounterMode

    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            if loss_fn is None:
                forward_fn()
            else:
                for parameter, _ in kept:
                    parameter.grad = None  # otherwise the count would add to what the user has accumulated
                loss_fn(forward_fn()).backward()
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
    return counter.get_total_flops()
