# SPDX-License-Identifier: Apache-2.0
"""Dividing a batch into micro-batches, and joining what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fabric.utilities.apply_func import apply_to_tensors


def tensors_in(data: Any) -> list[Tensor]:
    """The tensors in nested containers, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    apply_to_tensors(data, note)
    return found


def batch_size(data: Any, call: str) -> int:
    """The first dimension of all tensors in a batch; 0 if there are none.

    Args:
        data: Inputs and targets, in any nesting of containers.
        call: How the user wrote the call, for errors.

    Raises:
        ValueError: If they differ.
    """
    shapes = [list(tensor.shape) for tensor in tensors_in(data)]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) > 1 or None in sizes:
        raise ValueError(
            f"`{call}` divides each tensor along its first dimension into micro-batches, but got tensors of the shapes"
            f" {', '.join(map(str, shapes))}. Give all of them one entry for each sample; what is no tensor goes to"
            " every micro-batch as it is."
        )
    return next((size for size in sizes if size is not None), 0)


def divided(data: Any, number: int) -> list[Any]:
    """So many parts of a batch, along the first dimension of its tensors; what is no tensor is in all of them."""
    if number == 1:
        return [data]
    split = [torch.tensor_split(tensor, number) for tensor in tensors_in(data)]

    def part(index: int) -> Any:
        pieces = iter([pieces[index] for pieces in split])
        return apply_to_tensors(data, lambda _: next(pieces))

    return [part(index) for index in range(number)]


def joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What micro-batches gave, as if they had been one batch.

    Args:
        outputs: Of each micro-batch, all of the same nesting.
        sizes: Samples of each micro-batch.

    Raises:
        ValueError: If a tensor does not have one entry for each sample.
    """
    if len(outputs) == 1:
        return outputs[0]
    pieces = [tensors_in(output) for output in outputs]
    for output, size in zip(pieces, sizes, strict=True):
        for tensor in output:
            if tensor.dim() == 0 or tensor.shape[0] != size:
                raise ValueError(
                    f"The model returned a tensor of shape {list(tensor.shape)} for a micro-batch of {size} samples,"
                    " which can't be joined with those of the other micro-batches. Return one entry for each sample."
                )
    columns = iter(list(zip(*pieces, strict=True)))
    return apply_to_tensors(outputs[0], lambda _: torch.cat(next(columns)))
