# SPDX-License-Identifier: Apache-2.0
"""From sizes to the mesh of ranks."""

from __future__ import annotations

import atexit
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Size = int | Literal["auto"]


@dataclass(frozen=True)
class MeshSizes:
    """How the ranks of a job are divided; their product is the world size.

    The global rank is `((replicate * data + d) * context + c) * tensor + t`, so that the ranks of a tensor group are
    neighbours.

    Args:
        replicate: Copies of the whole sharded model, for hybrid sharding.
        data: Ranks over which parameters are sharded and that read different data.
        context: Ranks that share a batch and have different parts of its sequence.
        tensor: Ranks that share a batch and have different parts of each layer.
        hybrid: Whether the mesh has a dimension for the copies.
    """

    replicate: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    hybrid: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.data * self.context * self.tensor

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups of ranks, that read different data."""
        return self.replicate * self.data

    def data_parallel_rank(self, global_rank: int) -> int:
        """Which part of the data a rank reads."""
        return global_rank // (self.context * self.tensor)

    def build(self, device_type: str, timeout: timedelta, *, tensor_dimension: bool) -> DeviceMesh:
        """The mesh on which parameters lie; collective.

        Its dimensions are `data_parallel`, or `replicate` and `shard` for hybrid sharding, and `tensor_parallel`.
        Context ranks hold equal parameters, as ranks with different data do, and count as such here.

        Args:
            device_type: `cpu` or `cuda`.
            timeout: How long a collective of its groups may wait.
            tensor_dimension: Whether there is a dimension `tensor_parallel`, of size 1 too.
        """
        sharded = self.data * self.context
        dimensions = {"replicate": self.replicate, "shard": sharded} if self.hybrid else {"data_parallel": sharded}
        if tensor_dimension:
            dimensions["tensor_parallel"] = self.tensor
        return build_mesh(device_type, dimensions, timeout)

    def build_context(self, device_type: str, timeout: timedelta) -> DeviceMesh:
        """The one-dimensional mesh `context_parallel` of this rank; collective."""
        data = self.replicate * self.data
        dimensions = {"data_parallel": data, "context_parallel": self.context, "tensor_parallel": self.tensor}
        return build_mesh(device_type, dimensions, timeout)["context_parallel"]


def build_mesh(device_type: str, dimensions: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """The mesh of all ranks; collective.

    Args:
        device_type: `cpu` or `cuda`.
        dimensions: The sizes of its dimensions, by their names.
        timeout: How long a collective of its groups may wait.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD and dist.get_backend(group) in ("gloo", "nccl"):
            _set_pg_timeout(timeout, group)  # no public way to make a mesh lets its groups have their own
    atexit.register(release_groups, mesh)  # registered after, so it runs before, what leaves the process group
    return mesh


def release_groups(mesh: DeviceMesh) -> None:
    """Let `destroy_process_group` end the groups of a mesh, also where the mesh lives on.

    PyTorch keeps meshes for as long as the process runs, in what it remembers of operations, and each holds its groups
    in a private dictionary. Their threads would then end with the interpreter, which may end the process by SIGABRT.
    """
    root = mesh if mesh._root_mesh is None else mesh._root_mesh
    root._pg_registry.clear()


def forget_former_meshes() -> None:
    """Let PyTorch forget the meshes of a process group that has ended in this process.

    It remembers how operations on a `DTensor` were planned, by meshes that count as equal if they have the same ranks
    and names, and would go on with the ended group. There is no public way to make it forget.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def choose_tensor_size(world_size: int, machines: int, others: int) -> int:
    """What `tensor_parallel_size="auto"` is where the data size is not said either: the devices of a machine.

    Fewer where these don't divide what is left by the other sizes: the most that divide both. Ranks that split layers
    talk in each of them, so they should be on one machine.

    Args:
        world_size: Number of ranks.
        machines: Number of machines.
        others: Product of the sizes that were said.
    """
    return math.gcd(world_size // machines, max(1, world_size // others))


def divide(call: str, world_size: int, sizes: dict[str, Size]) -> dict[str, int]:
    """Fill in the one size that is "auto".

    Args:
        call: The strategy as the user wrote it, for errors.
        world_size: Number of ranks.
        sizes: By argument; at most one of them "auto".

    Raises:
        ValueError: If a size is no positive number, or the sizes do not multiply to the world size.
    """
    for name, size in sizes.items():
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"`{call}({name}={size!r})` is not a number of ranks. Write 1 or more, or 'auto'.")
    known = math.prod(size for size in sizes.values() if isinstance(size, int))
    rest, remainder = divmod(world_size, known)
    filled = {name: size if isinstance(size, int) else rest for name, size in sizes.items()}
    if remainder or math.prod(filled.values()) != world_size:
        product = " * ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"`{call}`: {product} can't be divided over {world_size} processes: the sizes multiply to {known}."
            f" Make them multiply to {world_size}, or leave one of them 'auto'."
        )
    return filled
