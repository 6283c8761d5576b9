# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold the same as this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fabric.checkpoint.state.shards import is_sharded
from fabric.strategies.sharding.tensor import TENSOR

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def replicas_of(tensor: Tensor, mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks that hold the same part of a parameter as this one.

    Args:
        tensor: On a part of the mesh; a dimension of the mesh that it does not lie on holds copies. A plain one, which
            the strategy does not look after where data differ, has copies in its tensor group.
        mesh: The strategy's.
    """
    names = mesh.mesh_dim_names or ()
    divided = set(names) - {TENSOR}
    if is_sharded(tensor):
        own_names = tensor.device_mesh.mesh_dim_names or ()  # type: ignore[attr-defined]
        placements = tensor.placements  # type: ignore[attr-defined]
        divided = {name for name, place in zip(own_names, placements, strict=False) if not place.is_replicate()}
        if not own_names or not set(own_names) <= set(names):
            divided = set(names)  # a mesh of the user's own
    ranks, coordinate = mesh.mesh, list(mesh.get_coordinate() or ())
    for dim in reversed(range(len(names))):
        if names[dim] in divided:
            ranks = ranks.select(dim, coordinate[dim])
    return tuple(sorted(ranks.flatten().tolist()))
