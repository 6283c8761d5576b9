# SPDX-License-Identifier: Apache-2.0
"""Splitting the layers of a model over a tensor group, by the user's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fabric.checkpoint.state.shards import is_sharded
from fabric.strategies.sharding.ties import keep_frozen, keep_ties

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TENSOR = "tensor_parallel"
ParallelizeFn = Callable[[Module, "DeviceMesh"], Module]


def parallelize(module: Module, function: ParallelizeFn, mesh: DeviceMesh) -> int:
    """Let the user's function split a model in place; collective.

    Args:
        module: The user's model.
        function: Splits it; it is given the model and the mesh.
        mesh: The strategy's mesh, with a dimension `tensor_parallel`.

    Returns:
        How many parameters lie on the dimension `tensor_parallel` of the mesh.

    Raises:
        TypeError: If the function did not return the module that it was given.
        ValueError: If it untied parameters.
    """
    with keep_ties(module), keep_frozen(module):
        result: Any = function(module, mesh)
        if result is not module:
            raise TypeError(
                f"`ModelParallelStrategy(parallelize_fn=...)` has to change `{type(module).__name__}` in place and"
                f" return it, but it returned {_describe(result)}. End it with `return module`; compile a model, or put"
                " it into another one, before `fabric.setup`."
            )
    return sum(map(is_split, module.parameters()))


def is_split(parameter: Tensor) -> bool:
    """Whether a parameter lies on a mesh with a dimension `tensor_parallel`."""
    return is_sharded(parameter) and TENSOR in (parameter.device_mesh.mesh_dim_names or ())  # type: ignore[attr-defined]


def _describe(result: Any) -> str:
    return "None" if result is None else f"another object, of type `{type(result).__name__}`"


@torch.no_grad()
def align_gradients(optimizer: Optimizer) -> None:
    """Place each gradient like its parameter; collective where ranks of a tensor group still have to add theirs up.

    Autograd leaves gradients as the backward of the split layers makes them: that of a norm on a part of the sequence
    is a sum that is still to be made, and others are whole on each rank though their parameter is not.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and is_sharded(gradient) and gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
