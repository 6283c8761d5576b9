# SPDX-License-Identifier: Apache-2.0
"""What reducing over ranks means, for one rank too."""

from typing import Literal

import torch
from torch import Tensor

ReduceOp = Literal["mean", "avg", "sum", "min", "max", "product"]
_CHOICES = ("avg", "max", "mean", "min", "product", "sum")


def validated(reduce_op: str) -> str:
    """The name of a reduction in lower case, with `mean` for `avg`.

    Raises:
        ValueError: If it is none.
    """
    name = str(reduce_op).lower()
    if name not in _CHOICES:
        raise ValueError(f"`reduce_op={reduce_op!r}` is not a reduction. Choose one of {', '.join(_CHOICES)}.")
    return "mean" if name == "avg" else name


def copied(tensor: Tensor, reduce_op: str) -> Tensor:
    """A contiguous copy without a graph, so that the caller's tensor stays as it is; bools count as 0 and 1.

    For a mean, integers of all sizes become int64, since their sum need not fit into their own type.
    """
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if reduce_op == "mean" and not (result.is_floating_point() or result.is_complex()):
        return result.long()
    return result.int() if result.dtype is torch.bool else result


def finished(total: Tensor, reduce_op: str, world_size: int) -> Tensor:
    """The result from the reduced tensor: a mean is a sum divided by the number of ranks, a float for integers too."""
    return total / world_size if reduce_op == "mean" else total
