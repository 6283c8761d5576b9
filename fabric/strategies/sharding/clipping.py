# SPDX-License-Identifier: Apache-2.0
"""Norms and clipping of gradients that are spread over ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from fabric.checkpoint.shards import is_sharded
from fabric.utilities.local_parts import local_gradients


@torch.no_grad()
def total_norm(
    parameters: Iterable[Tensor],
    norm_type: float,
    device: torch.device,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The joint p-norm of all gradients, of which each rank may hold parts; collective.

    Each element counts once: parts are added up over the dimensions of their mesh that divide them, and copies, such
    as the plain parameters of a model, are not. All ranks must give the same parameters in the same order, whether or
    not these have gradients here.

    Args:
        parameters: Plain and sharded ones, on any meshes.
        norm_type: The p; `inf` for the largest magnitude.
        device: Where the ranks talk.
        reduce: Combines what this and other ranks have found, where their parameters are not the same (the stages of a
            pipeline). It is given the sum of the p-th powers, or for `inf` the maximum.

    Returns:
        A plain scalar, equal on all ranks, in the dtype of the gradients.

    Raises:
        ValueError: If the p is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"`norm_type={norm_type!r}` is not positive. Choose 1.0, 2.0, `math.inf` or another p > 0.")
    parameters = list(parameters)
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    parts = [_norm_of(group, norm_type, device, operation) for group in _by_placement(parameters).values()]
    total = torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64, device=device)
    total = total.max() if math.isinf(norm_type) else total.sum()
    total = total if reduce is None else reduce(total)
    total = total if math.isinf(norm_type) else total ** (1 / norm_type)
    dtypes = [parameter.grad.dtype for parameter in parameters if parameter.grad is not None]
    return total.to(dtypes[0] if dtypes else torch.get_default_dtype())


def clip_by_norm(parameters: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale all gradients down by the same factor, so that their joint norm `total` becomes at most `max_norm`."""
    clip_grads_with_norm_(local_gradients(parameters), max_norm, total)


def clip_by_value(parameters: Iterable[Tensor], clip_val: float) -> None:
    """Clamp each element of the gradients to `[-clip_val, clip_val]`."""
    clip_grad_value_(local_gradients(parameters), clip_val)


def refuse_nonfinite(total: Tensor, norm_type: float) -> None:
    """Raise where the norm is infinite or NaN; it is equal on all ranks, so that all of them raise.

    Raises:
        RuntimeError: If it is.
    """
    if not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} of the gradients is {total.item()}, so they can't be clipped."
            " To scale them by it all the same, pass `error_if_nonfinite=False`."
        )


def _by_placement(parameters: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Parameters whose parts are added up over the same dimensions of the same mesh."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        groups[_dividing(parameter)].append(parameter)
    return groups


def _dividing(parameter: Any) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a parameter and its dimensions that divide it; none for a plain one."""
    if not is_sharded(parameter):
        return None, ()
    mesh, placements = parameter.device_mesh, parameter.placements
    return mesh, tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())


def _norm_of(group: list[Tensor], norm_type: float, device: torch.device, operation: Any) -> Tensor:
    """The sum of the p-th powers, or the maximum, over this group of parameters and the ranks that share them.

    Float64, since the square of a large float32 may be infinite.
    """
    gradients = [stand_in.grad for stand_in in local_gradients(group)]
    norm = get_total_norm([gradient for gradient in gradients if gradient is not None and gradient.numel()], norm_type)
    norm = norm.to(device=device, dtype=torch.float64)
    # A maximum over ranks may lose a NaN, so that this is sent beside it.
    sent = (
        norm**norm_type if math.isfinite(norm_type) else torch.stack([norm.nan_to_num(posinf=math.inf), norm.isnan()])
    )
    mesh, dims = _dividing(group[0])
    for dim in dims:
        dist.all_reduce(sent, op=operation, group=mesh.get_group(dim))
    return sent if math.isfinite(norm_type) else torch.where(sent[1] > 0, math.nan, sent[0])
