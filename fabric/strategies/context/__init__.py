# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: one sequence over several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from fabric.strategies.context.context import ContextParallel
from fabric.strategies.context.exchanging import ExchangingContext
from fabric.strategies.context.ring import RingContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "ContextMethod",
    "ContextParallel",
    "ExchangingContext",
    "RingContext",
    "create_context",
    "validated_method",
]

ContextMethod = Literal["auto", "exchange", "ring"]


def create_context(mesh: DeviceMesh, method: ContextMethod = "auto") -> ContextParallel:
    """How the ranks of a mesh of one dimension share sequences.

    Args:
        mesh: The ranks, in the order of the sequence.
        method: `ring` (PyTorch's, CUDA only), `exchange` (any device), or `auto`: `ring` on CUDA.

    Raises:
        ValueError: If it is `ring` on another device.
    """
    if method == "ring" and mesh.device_type != "cuda":
        raise ValueError(
            f"`context_parallel_method='ring'` needs CUDA, and this run uses {mesh.device_type}."
            " Leave it out, or choose 'exchange'."
        )
    if method == "ring" or (method == "auto" and mesh.device_type == "cuda"):
        return RingContext(mesh)
    return ExchangingContext(mesh.get_group())


def validated_method(call: str, method: Any) -> ContextMethod:
    """What was given as `context_parallel_method`.

    Args:
        call: The strategy as the user wrote it, for the error.
        method: The argument.

    Raises:
        ValueError: If there is no such method.
    """
    if method not in get_args(ContextMethod):
        raise ValueError(
            f"`{call}(context_parallel_method={method!r})` is not a way to attend over ranks. Choose 'exchange'"
            " (of heads or keys, on any device), 'ring' (PyTorch's ring attention, on CUDA), or 'auto': 'ring' on CUDA."
        )
    return cast(ContextMethod, method)
