# SPDX-License-Identifier: Apache-2.0
"""Learning what the stages hand on, before a schedule runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fabric.strategies.pipelining.place import Place
from fabric.strategies.pipelining.stages import Stage

Meta = tuple[Tensor, ...]  # on the meta device: shapes and dtypes, and what needs gradients


@dataclass(frozen=True)
class _Report:
    """What one stage hands on, or why it failed."""

    outputs: Meta = ()
    error: str | None = None


def rehearse(
    stages: dict[int, Stage],
    ranks: Sequence[int],
    run: Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]],
    place: Place,
    text: str,
) -> list[Meta]:
    """Run one micro-batch forward through the pipeline, stage after stage.

    PyTorch's own way would run backward too, leave its traces in batch statistics, and let a stage that fails hang the
    others. Here nothing is left behind, and an error is raised on every rank of the pipeline.

    Args:
        stages: Those of this rank, by their index.
        ranks: For each stage its rank in the pipeline.
        run: Runs a stage of this rank, and returns what it hands on.
        place: This rank in the pipeline.
        text: Shapes and dtypes of the micro-batch, which have to be the same on all ranks of the pipeline.

    Returns:
        What the first stage hands on, what the second one does, and so on.

    Raises:
        ValueError: If the ranks of the pipeline have unlike micro-batches.
        RuntimeError: If a stage fails; its own error is the cause on the rank that has it.
    """
    texts = place.objects(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ValueError(
                f"The ranks of a pipeline need the same batch, but rank {place.global_ranks[0]} has {texts[0]} in a"
                f" micro-batch and rank {place.global_ranks[rank]} has {other}. A loader from"
                " `fabric.setup_dataloaders(loader)` gives all of them the same."
            )
    metas: list[Meta] = []
    received: tuple[Tensor, ...] = ()
    for index, rank in enumerate(ranks):
        outputs: tuple[Tensor, ...] = ()
        error = None
        report = _Report()
        if rank == place.rank:
            try:
                with _without_traces(stages[index], place.device):
                    outputs = run(index, received)
                report = _Report(tuple(map(_meta, outputs)))
            except Exception as exception:
                error = exception
                report = _Report(error=f"{type(exception).__name__}: {exception}")
        report = place.object_of(rank, report)
        if report.error is not None:
            raise RuntimeError(
                f"Stage {index} of the pipeline, on rank {place.global_ranks[rank]}, failed with a micro-batch of"
                f" {text}: {report.error}"
            ) from error
        metas.append(report.outputs)
        if index + 1 < len(ranks):
            received = _handed_on(outputs, report.outputs, rank, ranks[index + 1], place)
    return metas


def _handed_on(outputs: tuple[Tensor, ...], metas: Meta, source: int, to: int, place: Place) -> tuple[Tensor, ...]:
    """What the next stage receives, on its rank."""
    if source != to and place.rank == source:
        for tensor in outputs:
            place.send(tensor.detach(), to).wait()
    if place.rank != to:
        return ()
    if source != to:
        outputs = tuple(place.receive(meta, source) for meta in metas)
    wanted = torch.is_grad_enabled()
    pairs = zip(outputs, metas, strict=True)
    return tuple(tensor.detach().requires_grad_(wanted and meta.requires_grad) for tensor, meta in pairs)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


@contextmanager
def _without_traces(stage: Stage, device: torch.device) -> Iterator[None]:
    """Put buffers and random numbers back; inside, all parameters want gradients, so that freezing changes no shape."""
    tensors = stage.tensors
    buffers = [(tensor, tensor.clone()) for tensor in tensors if not isinstance(tensor, torch.nn.Parameter)]
    frozen = [
        tensor
        for tensor in tensors
        if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and tensor.is_floating_point()
    ]
    drawn = random.getstate(), np.random.get_state()
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        for parameter in frozen:
            parameter.requires_grad_(False)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
