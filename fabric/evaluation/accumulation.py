# SPDX-License-Identifier: Apache-2.0
"""Windows of micro-batches whose gradients are those of one big batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import override

from fabric.data import Placed, _FabricDataLoader
from fabric.evaluation.weighted import exact_dtype
from fabric.strategies import Strategy
from fabric.utilities.apply_func import apply_to_tensors

Count = Callable[[Any], Any] | Literal["samples"] | None


class Accumulation(Iterable["MicroBatches"], Placed):
    """What `fabric.accumulate` returns: each iteration goes through an epoch of the loader, window by window.

    Args:
        loader: A set-up loader.
        steps: Micro-batches of a window; the last one of an epoch may have fewer.
        count: What the mean is over: None for micro-batches, `"samples"`, or a function of a batch.
        strategy: Sums the counts over the ranks.
        before_sum: Called before each of these sums.

    Raises:
        TypeError, ValueError: If one of them is no such thing.
    """

    def __init__(
        self, loader: Any, steps: int, count: Count, strategy: Strategy, before_sum: Callable[[], None]
    ) -> None:
        _validate(loader, steps, count)
        self._loader = loader
        self._steps = steps
        self._count = count
        self._strategy = strategy
        self._before_sum = before_sum

    def __len__(self) -> int:
        return -(-len(self._loader) // self._steps)

    @property
    @override
    def place(self) -> tuple[int, int]:
        """Epoch, and windows that were yielded."""
        epoch, position = self._loader.place
        return epoch, -(-position // self._steps)

    def __iter__(self) -> Iterator["MicroBatches"]:
        return self._windows(iter(self._loader))  # the loader starts now, and shows its place

    def _windows(self, batches: Iterator[Any]) -> Iterator["MicroBatches"]:
        size = self._steps
        while size == self._steps:
            entries = [self._entry(batch) for batch in islice(batches, size)]
            size = len(entries)
            if size:
                window = MicroBatches(entries, self._count_per_rank(entries), self._strategy)
                yield window
                window._release()  # the loop still holds this window while the next one is filled

    def _entry(self, batch: Any) -> "_MicroBatch":
        if self._count is None:
            return _MicroBatch(batch, 1, takes_mean=True)
        share = self._loader.share
        valid: int | None = None if share is None else share.valid
        counted = _number_of_samples(batch) if self._count == "samples" else self._count(batch)
        if self._count == "samples":
            return _MicroBatch(batch, len(range(counted)[:valid]), samples=counted, valid=valid)
        if not isinstance(counted, Tensor | Real) or (isinstance(counted, Tensor) and counted.dim() > 1):
            what = f"a tensor of shape {tuple(counted.shape)}" if isinstance(counted, Tensor) else repr(counted)
            raise TypeError(
                "`fabric.accumulate(..., count=function)`: the function takes a batch and returns one number, or a"
                f" tensor with one for each sample, but this one returned {what}."
            )
        if isinstance(counted, Tensor) and counted.dim():
            return _MicroBatch(batch, counted[:valid].sum(), samples=len(counted), valid=valid)
        return _MicroBatch(batch, counted if isinstance(counted, Tensor) else float(counted))

    def _count_per_rank(self, entries: Sequence["_MicroBatch"]) -> Tensor:
        device = self._strategy.root_device
        counts = [torch.as_tensor(e.count, dtype=exact_dtype(device), device=device).detach() for e in entries]
        own = torch.stack(counts).sum()
        if self._count is None:
            return own
        self._before_sum()
        return self._strategy.gather_alike(own).mean()


@dataclass(frozen=True)
class _MicroBatch:
    """A batch and its part in the mean.

    Args:
        batch: What the loader yielded.
        count: What it counts.
        takes_mean: Whether its loss comes as a mean.
        samples: How many losses are to come for it; None where they come as one number or a sum.
        valid: So many samples, the first ones, are real; None for all.
    """

    batch: Any
    count: Tensor | float
    takes_mean: bool = False
    samples: int | None = None
    valid: int | None = None


class MicroBatches(Sequence[Any]):
    """One window: the batches up to the next optimizer step, and what their losses have to be divided by.

    It may be gone through more than once, until the next window is asked for.

    Args:
        entries: The batches.
        count_per_rank: The count of the window, as the mean over all ranks.
        strategy: Averages the gradients over its data-parallel ranks.
    """

    def __init__(self, entries: list[_MicroBatch], count_per_rank: Tensor, strategy: Strategy) -> None:
        self._entries = entries
        self._length = len(entries)
        self._count_per_rank = count_per_rank
        self._data_parallel_size = strategy.distributed_sampler_kwargs["num_replicas"]
        self._parts_of_batch = strategy.parts_of_batch
        self._current: int | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        batches = [entry.batch for entry in self._available()]
        return batches[index]

    def __iter__(self) -> Iterator[Any]:
        try:
            for index in range(self._length):
                self._current = index
                yield self._available()[index].batch
        finally:
            self._current = None

    @property
    def is_last(self) -> bool:
        """Whether the batch at hand is the window's last one: that whose backward synchronises the gradients."""
        return self._current is None or self._current == self._length - 1

    @property
    def total(self) -> Tensor:
        """What the mean is over: the count of all micro-batches of this window on all ranks, a scalar."""
        return self._count_per_rank * self._data_parallel_size

    def mean(self, losses: Tensor) -> Tensor:
        """The part of the batch at hand in the mean over the whole window and all ranks; run backward from it.

        Strategies average gradients over the data-parallel ranks, as they have to for mean losses to be right. So the
        sum is divided by the total count and multiplied by the number of these ranks, or, what is the same, divided by
        the count per rank. The gradients then add up to those of `sum of all losses / total count`. Where nothing
        counts in the whole window, they are 0. Ranks that share a sequence (`fabric.context_parallel`) each bring the
        losses of their own tokens, while the count is that of whole batches: these losses are added up too, and so are
        those of the micro-batches that a pipeline makes of a batch.

        Args:
            losses: Without `count=`, the mean loss of the micro-batch, a scalar. Where `count` is a number for each
                batch, a sum of losses, or a tensor of any shape that is summed. Where it is one for each sample
                (`"samples"`, or a function that returns a tensor of them), losses with the batch as the first
                dimension: those of samples that only repeat others are left out.

        Returns:
            A scalar, at least in float32.

        Raises:
            RuntimeError: Outside of a loop over this window.
            ValueError: If the losses are not of that shape.
        """
        if self._current is None:
            raise RuntimeError(
                "`micro_batches.mean(losses)` belongs to the batch at hand, and there is none."
                " Call it inside `for batch in micro_batches:`."
            )
        entry = self._available()[self._current]
        _validate_losses(losses, entry, self._parts_of_batch)
        kept = losses if entry.samples is None else losses[: entry.valid]
        dtype = torch.promote_types(losses.dtype, torch.float32)
        divisor = torch.where(self._count_per_rank == 0, 1, self._count_per_rank)
        parts = 1 if entry.takes_mean else self._parts_of_batch  # of the batch, each with its own losses
        return kept.sum(dtype=dtype) * parts / divisor.to(losses.device, dtype)

    def _available(self) -> list[_MicroBatch]:
        if not self._entries:
            raise RuntimeError(
                "This window of `fabric.accumulate` is over: the batches of one window at a time are kept."
                " Use them before the next window is asked for."
            )
        return self._entries

    def _release(self) -> None:
        self._entries.clear()


def _validate_losses(losses: Tensor, entry: _MicroBatch, parts: int) -> None:
    shape = tuple(losses.shape)
    if entry.takes_mean and shape:
        raise ValueError(
            f"`micro_batches.mean(loss)` takes the mean loss of the batch, and got a tensor of shape {shape}."
            " Pass `losses.mean()`, or say what the mean is over: `fabric.accumulate(loader, steps, count='samples')`."
        )
    if entry.samples is not None and parts > 1 and len(shape) > 0 and shape[0] * parts == entry.samples:
        raise ValueError(
            f"`micro_batches.mean(losses)` got losses of shape {shape} for a batch of {entry.samples} samples, of which"
            f" `loss_fn` is given one of {parts} parts at a time. Count with a function that returns one number,"
            " `fabric.accumulate(loader, steps, count=lambda batch: float(len(batch[0])))`, and pass the sum of losses."
        )
    if entry.samples is not None and shape[:1] != (entry.samples,):
        raise ValueError(
            f"`micro_batches.mean(losses)` got losses of shape {shape} for a batch of {entry.samples} samples."
            " Pass one for each sample (`reduction='none'`), so that those that only repeat others can be left out."
        )


def _number_of_samples(batch: Any) -> int:
    sizes: list[int] = []

    def see(tensor: Tensor) -> Tensor:
        sizes.extend(tensor.shape[:1])
        return tensor

    apply_to_tensors(batch, see)
    if not sizes:
        raise ValueError(
            "`fabric.accumulate(..., count='samples')` takes the first dimension of the first tensor of a batch, and"
            f" this one, of type `{type(batch).__name__}`, has none. Pass a function that counts: `count=len`."
        )
    return sizes[0]


def _validate(loader: Any, steps: Any, count: Any) -> None:
    if not isinstance(loader, _FabricDataLoader):
        raise TypeError(
            "`fabric.accumulate(loader, steps)` takes a loader that `fabric.setup_dataloaders(...)` returned, but got"
            f" `{type(loader).__name__}`."
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(
            f"`fabric.accumulate(loader, steps={steps!r})` takes the number of micro-batches of a window, 1 or more."
        )
    if count is not None and count != "samples" and not callable(count):
        raise TypeError(
            f"`fabric.accumulate(loader, steps, count={count!r})` takes None, 'samples', or a function that is called"
            " with a batch and returns what counts in it."
        )
