# SPDX-License-Identifier: Apache-2.0
"""Making tensors of different ranks alike."""

from collections.abc import Sequence

import torch
from torch import Tensor


def padded_to(tensor: Tensor, shape: Sequence[int], value: float) -> Tensor:
    """The tensor, filled up at the end of each dimension; itself where nothing is missing.

    Args:
        tensor: Any dtype; gradients flow back to it.
        shape: As many sizes as it has dimensions, none of them smaller than its own.
        value: What to fill up with.

    Example:
        >>> padded_to(torch.ones(1, 2, dtype=torch.int64), (2, 3), -1).tolist()
        [[1, 1, -1], [-1, -1, -1]]
    """
    missing = [want - have for want, have in zip(shape, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    ends = [amount for size in reversed(missing) for amount in (0, size)]
    return torch.nn.functional.pad(tensor, ends, value=value)


def validate_pad_value(call: str, dtype: torch.dtype, value: float) -> None:
    """Ask for it on every rank, before only those that have to fill up would fail.

    Raises:
        ValueError: If a tensor of this dtype can't hold the value.
    """
    try:
        stored = padded_to(torch.empty(0, dtype=dtype), (1,), value).item()
        fits = dtype.is_floating_point or dtype.is_complex or stored == value
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"`fabric.{call}(..., pad_value={value!r})`: a tensor of {dtype} can't hold this value."
            " Pass one that fits, or convert the tensor first."
        )
