# SPDX-License-Identifier: Apache-2.0
"""Talking to the other ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from fabric import evaluation, validation
from fabric.evaluation import Agreement
from fabric.facade.identity import Identity
from fabric.strategies.reduction import ReduceOp
from fabric.strategies.turns import first_ranks_first
from fabric.utilities.apply_func import apply_to_tensors

T = TypeVar("T")


class Talk(Identity):
    """The collectives: call each of them on every rank."""

    _agreement: Agreement

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            with self._screen.aside():
                print(*args, **kwargs)  # noqa: T201

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here."""
        self._require_launch("barrier", name=name)
        self._strategy.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank `src`, on every rank."""
        self._require_launch("broadcast", src=src)
        return self._strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False, pad_value: float | None = None) -> Any:
        """Tensors (or numbers, in any nesting of containers) of all ranks, stacked along a new first dimension.

        Args:
            data: What to gather; tensors must have the same shape and dtype on all ranks.
            group: A process group; by default all ranks.
            sync_grads: Let gradients flow back to the rank that each part came from.
            pad_value: Tensors whose sizes differ are filled up with it, at the end of each dimension, to the largest
                sizes on any rank; without it they raise.

        Returns:
            The same nesting, with tensors of shape `(world_size, *shape)`; with one rank, of shape `shape`.

        Raises:
            ValueError: On every rank, if the tensors are unlike.
        """
        self._require_launch("all_gather", data, group=group, pad_value=pad_value)
        options: dict[str, Any] = {"group": group, "sync_grads": sync_grads}
        if pad_value is not None:
            options["pad_value"] = pad_value
        return self._on_tensors(data, partial(self._strategy.all_gather, **options))

    def all_reduce(self, data: Any, group: Any = None, reduce_op: ReduceOp = "mean") -> Any:
        """Tensors (or numbers, in any nesting of containers), reduced over all ranks into new tensors.

        Args:
            data: What to reduce; it is not changed.
            group: A process group; by default all ranks.
            reduce_op: `mean` (of integers too: a float), `sum`, `min`, `max` or `product`.
        """
        self._require_launch("all_reduce", data, group=group, reduce_op=reduce_op)
        return self._on_tensors(data, partial(self._strategy.all_reduce, group=group, reduce_op=reduce_op))

    def gather_for_metrics(self, data: Any, loader: Any, in_order: bool = False, pad_value: float | None = None) -> Any:
        """What all ranks made of their last batches, each sample once: what pads the last batches is left out.

        Args:
            data: Tensors and NumPy arrays whose first dimension is the batch, lists and tuples with an item for each
                sample (strings, numbers, any objects without tensors), in any nesting of dictionaries, lists, tuples,
                named tuples and dataclasses. Gradients do not flow back.
            loader: The set-up loader whose last batch this is.
            in_order: Put the samples into the order of the data set (of the sampler), as one process sees them.
                Otherwise those of rank 0 come first, then those of rank 1, and so on.
            pad_value: Fills up dimensions other than the first where they differ over the ranks; without it that
                raises.

        Returns:
            The same nesting on every rank, tensors on the device that they came from. With one process that is `data`.

        Raises:
            TypeError: On every rank, if the loader was not set up.
            RuntimeError: On every rank, if it has not yielded a batch yet.
            ValueError: On every rank, if something in `data` does not have one entry for each sample of the batch, or
                if dtypes, structures or other dimensions differ over the ranks.

        Example::

            for batch in loader:
                predictions = model(batch["x"]).argmax(1)
                predictions, labels = fabric.gather_for_metrics((predictions, batch["y"]), loader)
                right += (predictions == labels).sum()
        """
        self._require_launch("gather_for_metrics", in_order=in_order, pad_value=pad_value)
        return evaluation.gather_for_metrics(data, loader, self._strategy, in_order=in_order, pad_value=pad_value)

    def weighted_mean(self, total: Tensor | float, count: Tensor | float) -> Tensor:
        """The sum of all ranks' totals divided by the sum of their counts, such as a loss per token.

        Args:
            total: A number, or a tensor of any shape, the same on all ranks.
            count: How many items went into it; a number, or a tensor that broadcasts with `total`.

        Returns:
            A tensor on the rank's device in float64 (float32 on `mps`), without a graph; NaN where all counts are 0.

        Example:
            >>> from fabric import Fabric
            >>> Fabric(accelerator="cpu", devices=1).weighted_mean(torch.tensor(6.0), 4).item()
            1.5
        """
        self._require_launch("weighted_mean")
        return evaluation.weighted_mean(total, count, self._strategy)

    def any_rank(self, flag: bool | Tensor, wait: bool = True) -> bool:
        """Whether any rank says True. Call it on every rank, in the same order as the other collectives.

        Args:
            flag: A bool, or a tensor with one element (on a GPU, reading it waits for the GPU).
            wait: False starts this vote and returns the answer of the call before it, at next to no cost: all ranks
                learn of it one step later, together. The first such call returns False. The last vote of a loop is
                answered by the first call in the next one, unless you call `any_rank(False, wait=False)` in between.

        Example::

            for step, batch in enumerate(loader):
                ...
                if fabric.any_rank(stop_requested, wait=False):
                    break
        """
        self._require_launch("any_rank", wait=wait)
        return self._agreement.vote("any_rank", flag, self._strategy, all=False, wait=wait)

    def all_ranks(self, flag: bool | Tensor, wait: bool = True) -> bool:
        """Whether all ranks say True. Call it on every rank, in the same order as the other collectives.

        Args:
            flag: A bool, or a tensor with one element (on a GPU, reading it waits for the GPU).
            wait: False starts this vote and returns the answer of the call before it, at next to no cost. The first
                such call returns True, so ask for what normally holds: `all_ranks(loss_is_finite, wait=False)`.
        """
        self._require_launch("all_ranks", wait=wait)
        return self._agreement.vote("all_ranks", flag, self._strategy, all=True, wait=wait)

    def join_uneven_inputs(self, module: Module, *modules: Module) -> AbstractContextManager[Any]:
        """Let ranks take unlike numbers of batches inside, under `ddp`: those that are through help the others.

        It is for loaders that give ranks unlike numbers of batches, which those of `setup_dataloaders` do not. Inside,
        only forward and backward of these modules may communicate: no other collective, and no `any_rank`.

        Args:
            module: A set-up module that is trained inside.
            *modules: All others. Each step calls every one of them once.

        Raises:
            RuntimeError: On every rank, if the strategy can't do that. With one process it does nothing.

        Example::

            with fabric.join_uneven_inputs(model):
                for batch in loader:
                    optimizer.zero_grad()
                    fabric.backward(model(batch).mean())
                    optimizer.step()
        """
        self._require_launch("join_uneven_inputs")
        call = "join_uneven_inputs(*modules)"
        inner = (validation._forward_module_of(each, call) for each in (module, *modules))
        return self._checks.uneven(self._strategy.join_uneven_inputs(*inner))

    def accumulate(
        self, loader: Any, steps: int, count: Callable[[Any], Any] | Literal["samples"] | None = None
    ) -> "evaluation.Accumulation":
        """The loader's batches in windows of `steps`, for accumulating gradients; the last window may be shorter.

        A window is a sequence of batches that knows how many there are, which one is the last (`is_last`), and what
        their losses have to be divided by (`mean`), so that the gradients are those of one process on one big batch.
        The batches of one window are kept at a time.

        Args:
            loader: A set-up loader.
            steps: Batches of a window on each rank.
            count: What the mean loss is over. None: micro-batches, all with the same weight. `"samples"`: samples,
                without those that pad the last batches. Or a function that takes a batch and returns what counts in
                it, such as its tokens: one number, or a tensor with one for each sample, in which case padding
                counts nothing either. It is called before the first backward of a window, which costs one collective.

        Raises:
            TypeError: If the loader was not set up, or `count` is no such thing.
            ValueError: If `steps` is not a positive integer.

        Example::

            for micro_batches in fabric.accumulate(loader, 4, count="samples"):
                for x, y in micro_batches:
                    with fabric.no_backward_sync(model, enabled=not micro_batches.is_last):
                        losses = cross_entropy(model(x), y, reduction="none")
                        fabric.backward(micro_batches.mean(losses))
                optimizer.step()
                optimizer.zero_grad()
        """
        self._require_launch("accumulate", steps=steps)
        return evaluation.Accumulation(loader, steps, count, self._strategy, partial(self._checks.call, "accumulate"))

    def _on_tensors(self, data: Any, function: Callable[[Tensor], Tensor]) -> Any:
        def apply(value: Tensor | float) -> Tensor:
            return function(torch.as_tensor(value, device=self.device))

        return apply_to_tensors(data, apply, number=apply)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Rank 0 runs the block first, the others afterwards; if it fails there, every rank raises.

        Args:
            local: Let the first rank of each machine go first, for files on a machine's own disk.
        """
        self._require_launch("rank_zero_first", local=local)
        return first_ranks_first(self._strategy, self.is_local_zero if local else self.is_global_zero)
