# SPDX-License-Identifier: Apache-2.0
"""Norms and clipping of gradients that are spread over ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from fabric.checkpoint.state.shards import is_sharded
from fabric.utilities.local_parts import local_gradients

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def total_norm(
    parameters: Iterable[Tensor],
    norm_type: float,
    device: torch.device,
    stages: ProcessGroup | None = None,
) -> Tensor:
    """The joint p-norm of all gradients, of which each rank may hold parts; collective.

    Each element counts once: parts are added up over the dimensions of their mesh that divide them, and copies, such
    as the plain parameters of a model, are not. But for stages, all ranks must give the same parameters in the same
    order, whether or not these have gradients here.

    Args:
        parameters: Plain and sharded ones, on any meshes.
        norm_type: The p; `inf` for the largest magnitude.
        device: Where the ranks talk.
        stages: The ranks whose parameters are not the same, such as the stages of a pipeline.

    Returns:
        A plain scalar in float64, equal on all ranks.

    Raises:
        ValueError: If the p is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"`norm_type={norm_type!r}` is not positive. Choose 1.0, 2.0, `math.inf` or another p > 0.")
    parts = [_norm_of(group, norm_type, device) for group in _by_placement(parameters).values()]
    total = torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64, device=device)
    total = total.max() if math.isinf(norm_type) else total.sum()
    total = _joined(total, norm_type, [] if stages is None else [stages])
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def clip_by_norm(parameters: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale all gradients down by the same factor, so that their joint norm `total` becomes at most `max_norm`."""
    clip_grads_with_norm_(local_gradients(parameters), max_norm, total)


def dtype_of_gradients(parameters: Iterable[Tensor]) -> torch.dtype:
    """That of the first gradient; the default one if there is none."""
    dtypes = (parameter.grad.dtype for parameter in parameters if parameter.grad is not None)
    return next(dtypes, torch.get_default_dtype())


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


def _norm_of(group: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of the p-th powers, or the maximum, over this group of parameters and the ranks that share them.

    Float64, since the square of a large float32 may be infinite.
    """
    gradients = [stand_in.grad for stand_in in local_gradients(group)]
    norm = get_total_norm([gradient for gradient in gradients if gradient is not None and gradient.numel()], norm_type)
    norm = norm.to(device=device, dtype=torch.float64)
    mesh, dims = _dividing(group[0])
    own = norm if math.isinf(norm_type) else norm**norm_type
    return _joined(own, norm_type, [mesh.get_group(dim) for dim in dims])


def _joined(own: Tensor, norm_type: float, groups: list[ProcessGroup]) -> Tensor:
    """The sum over the ranks of one group after the other, or the maximum, which may lose a NaN on its way."""
    if math.isfinite(norm_type):
        for group in groups:
            dist.all_reduce(own, group=group)
        return own
    sent = torch.stack([own.nan_to_num(posinf=math.inf), own.isnan()])
    for group in groups:
        dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    return torch.where(sent[1] > 0, math.nan, sent[0])
