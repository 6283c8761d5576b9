# SPDX-License-Identifier: Apache-2.0
"""This rank's part of tensors that may be spread over ranks."""

import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a `DTensor`, in the same memory; any other tensor itself. Nothing is sent."""
    package = sys.modules.get("torch.distributed.tensor")  # slow to import, and who has such a tensor has imported it
    if package is None or not isinstance(tensor, package.DTensor):
        return tensor
    local: Tensor = tensor.detach().to_local()
    return local


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Stand-ins for the parameters that have a gradient: plain tensors, whose `.grad` is this rank's part of it.

    What is done in place to the gradient of a stand-in is done to that of the parameter.
    """
    stand_ins = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_part(parameter.grad)
            stand_in = gradient.detach()
            stand_in.grad = gradient
            stand_ins.append(stand_in)
    return stand_ins


def any_rank(flag: bool, parameters: Iterable[Tensor]) -> bool:
    """Whether any rank says so, where parameters are spread over ranks; else the flag itself. Collective then."""
    package = sys.modules.get("torch.distributed.tensor")
    if package is None or not any(isinstance(parameter, package.DTensor) for parameter in parameters):
        return flag
    vote = torch.tensor(int(flag), device=_talking_device())
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote)


def _talking_device() -> torch.device:
    backend = dist.get_backend()
    return torch.device("cpu") if backend == "gloo" else torch.device(torch.accelerator.current_accelerator() or "cpu")
