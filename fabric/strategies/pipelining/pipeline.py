# SPDX-License-Identifier: Apache-2.0
"""What a set-up model is under the pipeline strategy: it trains and evaluates by sending micro-batches through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ParameterList
from typing_extensions import override

from fabric.plugins.precision import Precision
from fabric.strategies.entry import _Entry
from fabric.strategies.pipelining.microbatches import batch_size, divided, joined, tensors_in
from fabric.strategies.pipelining.place import Place
from fabric.strategies.pipelining.rehearsal import Meta, rehearse
from fabric.strategies.pipelining.schedules import Kind, create_schedule
from fabric.strategies.pipelining.shared import SharedGradients
from fabric.strategies.pipelining.stages import Stage
from fabric.utilities.apply_func import apply_to_tensors

LossFunction = Callable[[Any, Any], Tensor]


class Pipeline(_Entry):
    """One rank's part of a model that is divided into stages.

    Args:
        inner: The user's model, with only this rank's parameters in it.
        stages: The stages of this rank, by their index.
        ranks: For each stage its rank in the pipeline.
        place: This rank in the pipeline.
        kind: The schedule.
        num_microbatches: How many micro-batches a batch is divided into.
        precision: Surrounds each stage's forward.
        shared: The parameters that other ranks hold too.
    """

    def __init__(
        self,
        inner: Module,
        stages: dict[int, Stage],
        ranks: Sequence[int],
        *,
        place: Place,
        kind: Kind,
        num_microbatches: int,
        precision: Precision,
        shared: SharedGradients,
    ) -> None:
        super().__init__(inner)
        self.stages = stages
        self.ranks = tuple(ranks)
        self.shared = shared
        self.sends_gradients = True  # to the other data-parallel ranks, at the end of a step
        self._place = place
        self._kind = kind
        self._num_microbatches = num_microbatches
        self._precision = precision
        self._metas: dict[str, list[Meta]] = {}
        self._schedule: tuple[str, Any] = ("", None)  # PyTorch's are made for one shape of micro-batches each
        self._parts: list[Any] = []  # the micro-batches of the step that is running: args, kwargs and target
        self._loss_function: LossFunction | None = None
        self._scale: Tensor | float = 1.0

    @property
    def last(self) -> int:
        """The index of the last stage."""
        return len(self.ranks) - 1

    @override
    def forward(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluate: the output for the whole batch, on every rank of the pipeline."""
        name = type(self.inner).__name__
        if method != "forward":
            raise RuntimeError(
                f"`{name}.{method}()` can't run in a pipeline, where each rank holds a part of the model. Train with"
                " `fabric.forward_backward(model, x, target=y, loss_fn=loss_fn)`, and evaluate with `model(x)` under"
                " `torch.no_grad()`."
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"`{name}` can't keep a graph for `backward` in a pipeline: forward and backward of its micro-batches"
                " overlap. Train with `loss = fabric.forward_backward(model, x, target=y, loss_fn=loss_fn)`, and"
                " evaluate under `torch.no_grad()`."
            )
        size = batch_size((args, kwargs), "model(...)")
        self._parts = [(*part, None) for part in divided((args, kwargs), max(1, min(self._num_microbatches, size)))]
        self._loss_function = None
        try:
            return self._evaluate()
        finally:
            self._parts = []

    # one step

    def step(self, args: Any, kwargs: Any, target: Any, loss_function: LossFunction) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to those that are there.

        Returns:
            The mean loss of the micro-batches, on every rank of the pipeline, without a graph.
        """
        number = self._num_microbatches
        size = batch_size((args, kwargs, target), "fabric.forward_backward(...)")
        if not size or size % number:
            raise ValueError(
                f"`fabric.forward_backward(...)`: a batch of {size} can't be divided into {number} equal micro-batches"
                " (`num_microbatches`). Choose a batch size that is a multiple of it, and `drop_last=True` in the"
                " loader where the last batch is smaller."
            )
        args, kwargs = self._precision.convert_input((args, kwargs))
        self._parts = divided((args, kwargs, target), number)
        self._loss_function = loss_function
        self._scale = self._loss_scale()
        try:
            schedule, metas = self._prepared()
            losses: list[Tensor] = []
            numbers = torch.arange(number)
            with self.shared.added():
                schedule.step(number=numbers, target=numbers, losses=losses, return_outputs=False)
        except BaseException:
            self._schedule = ("", None)  # it may hold half a step
            raise
        finally:
            self._parts = []
        loss = torch.stack(losses).sum() / self._scale if losses else None
        return self._place.tensor_of(self.ranks[self.last], loss, like=metas[-1][0])

    def _loss_scale(self) -> Tensor | float:
        """What the precision multiplies a loss with before backward, which the schedule calls by itself."""
        if not self._precision.skips_nonfinite_steps:
            return 1.0
        one = torch.ones((), device=self._place.device, requires_grad=True)
        self._precision.backward(one, self.inner)
        return torch.ones(()) if one.grad is None else one.grad

    def _prepared(self) -> tuple[Any, list[Meta]]:
        """The schedule for micro-batches of this shape. It holds their buffers, so there is one at a time."""
        text, metas = self._shapes(self._parts[0])
        if self._schedule[0] != text:
            self._schedule = ("", None)
            self._schedule = (text, self._create_schedule(metas))
        return self._schedule[1], metas

    def _create_schedule(self, metas: list[Meta]) -> Any:
        from torch.distributed.pipelining import PipelineStage

        stages = [
            PipelineStage(
                _Caller(self, index, stage),
                index,
                len(self.ranks),
                self._place.device,
                input_args=metas[index - 1] if index else (),
                output_args=metas[index],
                group=self._place.group,
            )
            for index, stage in sorted(self.stages.items())
        ]
        return create_schedule(self._kind, stages, self._num_microbatches)

    def run(self, index: int, received: tuple[Tensor, ...], number: int) -> Any:
        """What a stage makes of a micro-batch: tensors to hand on; of the last one the output, or in training the loss.

        Args:
            index: A stage of this rank.
            received: What the stage before handed on.
            number: Which micro-batch of the batch.
        """
        args, kwargs, target = self._parts[number]
        with self._precision.forward_context():
            output = self.stages[index].run(tuple(map(_ContiguousGradient.apply, received)), args, kwargs)
        if index < self.last:
            return _validated(output)
        output = self._precision.convert_output(output)
        if self._loss_function is None:
            return output
        loss = self._loss_function(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"`loss_fn` has to return a tensor with one element, the mean over the batch that it is given, but"
                f" returned {_describe(loss)}."
            )
        return loss.reshape(()) * (self._scale / self._num_microbatches)

    def _shapes(self, part: Any) -> tuple[str, list[Meta]]:
        """What the stages hand on for a micro-batch like this one."""
        text = repr(apply_to_tensors([each for each in part if each is not None], _describe))
        key = f"{'train' if self.inner.training else 'eval'} {self._loss_function is not None} {text}"
        if key not in self._metas:
            number = next(n for n, each in enumerate(self._parts) if each is part)

            def run(index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                output = self.run(index, received, number)
                if index < self.last:
                    return output  # type: ignore[no-any-return]
                return (output,) if self._loss_function is not None else ()

            self._metas[key] = rehearse(self.stages, self.ranks, run, self._place, text)
        return key, self._metas[key]

    # evaluation

    def _evaluate(self) -> Any:
        """Forward only, a stage of this rank after the other, each for all micro-batches.

        PyTorch's schedules could do it (`schedule.eval`), but for one batch size, that of training, and not for stages
        in the shape of a V.
        """
        metas = [self._shapes(part)[1] for part in self._parts]
        local: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        sends: list[Any] = []
        outputs: list[Any] = []
        for index in sorted(self.stages):
            held_back: list[Tensor] = []
            for number in range(len(self._parts)):
                received = self._receive(index, local.pop((index, number), None), metas[number])
                output = self.run(index, received, number)
                if index == self.last:
                    outputs.append(output)
                elif index + 1 in self.stages:
                    local[index + 1, number] = output
                elif self._both_ways(index):
                    held_back += output
                else:
                    sends += [(self._place.send(tensor, self.ranks[index + 1]), tensor) for tensor in output]
            sends += [(self._place.send(tensor, self.ranks[index + 1]), tensor) for tensor in held_back]
        result = self._spread(outputs)
        for work, _ in sends:
            work.wait()
        return result

    def _receive(self, index: int, local: tuple[Tensor, ...] | None, metas: list[Meta]) -> tuple[Tensor, ...]:
        if index == 0 or local is not None:
            return local or ()
        return tuple(self._place.receive(meta, self.ranks[index - 1]) for meta in metas[index - 1])

    def _both_ways(self, index: int) -> bool:
        """Whether the rank that sends to this stage also receives from it: NCCL does one thing after the other."""
        return index > 0 and self.ranks[index - 1] == self.ranks[index + 1]

    def _spread(self, outputs: list[Any]) -> Any:
        """The joined output of the last stage, on every rank of the pipeline."""
        source = self.ranks[self.last]
        result: Any = None
        skeleton: Any = None
        error = None
        if outputs:
            try:
                result = joined(outputs, [batch_size(part, "model(...)") for part in self._parts])
                skeleton = apply_to_tensors(result, _as_meta)
            except ValueError as exception:
                error = str(exception)
        skeleton, error = self._place.object_of(source, (skeleton, error))
        if error is not None:
            raise ValueError(error)
        tensors = iter(tensors_in(result)) if outputs else None

        def spread(meta: Tensor) -> Tensor:
            return self._place.tensor_of(source, None if tensors is None else next(tensors), like=meta)

        return apply_to_tensors(skeleton, spread)


class _Caller(Module):
    """What PyTorch's stage calls; it has the parameters of a stage, which the zero-bubble schedules ask for."""

    def __init__(self, pipeline: Pipeline, index: int, stage: Stage) -> None:
        super().__init__()
        # Not the pipeline itself: as a submodule it would bring the parameters of all stages.
        self.call = partial(pipeline.run, index)
        self.held = ParameterList([each for each in stage.tensors if isinstance(each, torch.nn.Parameter)])

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        """Run the stage on one micro-batch, which every rank has."""
        return self.call(received, int(number))


class _ContiguousGradient(torch.autograd.Function):
    """Nothing in forward; in backward it makes the gradient contiguous, as what is sent has to be."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _validated(output: Any) -> tuple[Tensor, ...]:
    """What a stage hands on, as tensors that can be sent."""
    tensors = tuple(output) if isinstance(output, tuple | list) else (output,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"what it hands on has a `{type(tensor).__name__}` in it, and only tensors can be sent. Return a tensor"
                " or a tuple of tensors, or cut elsewhere."
            )
    return tuple(tensor.contiguous() for tensor in tensors)


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _Described(str):
    """A text that `repr` shows as it is."""

    def __repr__(self) -> str:
        return str(self)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a `{type(value).__name__}`"
    return _Described(f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}")
