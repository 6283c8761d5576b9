# SPDX-License-Identifier: Apache-2.0
"""Gradients that several ranks have a part of: tied parameters, and data-parallel copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BUCKET = 32 * 2**20  # bytes that are sent at once


class SharedGradients:
    """Adds up the gradients of parameters that stages on several ranks use.

    Args:
        parameters: This rank's copies, each with the group of the ranks that have one.
    """

    def __init__(self, parameters: Sequence[tuple[Tensor, ProcessGroup]]) -> None:
        self._parameters = list(parameters)

    @contextmanager
    def added(self) -> Iterator[None]:
        """Around a step: what it adds to the gradients is what it adds on any of the ranks."""
        before = [parameter.grad for parameter, _ in self._parameters]
        for parameter, _ in self._parameters:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for (parameter, _), earlier in zip(self._parameters, before, strict=True):
                parameter.grad = earlier
            raise
        for (parameter, group), earlier in zip(self._parameters, before, strict=True):
            if not parameter.requires_grad:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient if earlier is None else earlier.add_(gradient)


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], group: ProcessGroup) -> None:
    """Average gradients over the copies of a stage, those of earlier steps that were not averaged yet with them.

    A parameter that has a gradient on some of the ranks gets one on all of them.

    Args:
        parameters: The same on all ranks of the group.
        group: The ranks that have a copy.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    for bucket in _buckets(trainable):
        pieces = [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in bucket]
        used = torch.tensor([each.grad is not None for each in bucket], dtype=pieces[0].dtype, device=pieces[0].device)
        joint = torch.cat([*pieces, used]).div_(dist.get_world_size(group))
        dist.all_reduce(joint, group=group)
        *averaged, used = joint.split([*(piece.numel() for piece in pieces), len(bucket)])
        for number, (parameter, gradient) in enumerate(zip(bucket, averaged, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(gradient.view_as(parameter))
            elif used[number] > 0:
                parameter.grad = gradient.view_as(parameter).clone()


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or size >= _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
