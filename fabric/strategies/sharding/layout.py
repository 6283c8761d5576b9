# SPDX-License-Identifier: Apache-2.0
"""How `FSDPStrategy` divides the ranks into copies of the model and shards of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")


@dataclass(frozen=True)
class Layout:
    """What the user said about it.

    Args:
        sharding_strategy: One of `STRATEGIES`.
        reshard_after_forward: Whether units are freed between forward and backward, or over how many ranks sharded.
        asked: Sizes `(copies, shards)` or `(shards,)`.
        mesh: The user's own mesh.
    """

    sharding_strategy: str
    reshard_after_forward: bool | int
    asked: tuple[int, ...] | None = None
    mesh: DeviceMesh | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether the mesh has a dimension for the copies of the model."""
        return self.sharding_strategy in ("HYBRID_SHARD", "NO_SHARD")

    def sizes(self, world_size: int, local_world_size: int) -> tuple[int, int]:
        """Number of copies, and of shards of each.

        Args:
            world_size: All ranks.
            local_world_size: Ranks of a machine.

        Raises:
            ValueError: If what was asked for does not multiply to the number of ranks.
        """
        if self.asked is None:
            shards = {"HYBRID_SHARD": local_world_size, "NO_SHARD": 1}.get(self.sharding_strategy, world_size)
            if world_size % shards:
                raise ValueError(
                    f"`FSDPStrategy(sharding_strategy='HYBRID_SHARD')` makes a copy of the model on each machine, but"
                    f" {world_size} processes are no multiple of the {shards} on this one. Pass"
                    " `device_mesh=(copies, shards)`."
                )
            return world_size // shards, shards
        copies, shards = self.asked if len(self.asked) == 2 else (1, *self.asked)
        if copies * shards != world_size:
            written = "a mesh of sizes " + " x ".join(map(str, self.asked)) if self.mesh is not None else self.asked
            raise ValueError(
                f"`FSDPStrategy(device_mesh={written})` has {copies * shards} ranks, but this run has {world_size}"
                " processes. Make the sizes multiply to that number."
            )
        return copies, shards


def validated_layout(strategy: Any, reshard: bool | int | None, mesh: Any) -> Layout:
    """Check the arguments of `FSDPStrategy` that bear on it.

    Args:
        strategy: `sharding_strategy`, or None.
        reshard: `reshard_after_forward`, or None.
        mesh: `device_mesh`, or None.

    Raises:
        TypeError: If the mesh is neither sizes nor a `DeviceMesh`.
        ValueError: If a value is none of the choices, or two of them contradict each other.
    """
    sizes = _sizes_of(mesh)
    name = _name_of(strategy) if strategy is not None else None
    default = "HYBRID_SHARD" if sizes is not None and len(sizes) == 2 else "FULL_SHARD"
    layout = Layout(
        name or default,
        reshard_after_forward=_reshard_of(name or default, strategy is not None, reshard),
        asked=sizes,
        mesh=None if isinstance(mesh, Sequence) else mesh,
    )
    if sizes is not None and (len(sizes) == 2) != layout.is_hybrid:
        needs = "sizes `(copies, shards)`" if layout.is_hybrid else "one size, `(shards,)`"
        raise ValueError(
            f"`FSDPStrategy(sharding_strategy={name!r})` takes {needs}, but `device_mesh` has {len(sizes)}"
            f" dimension{'s' if len(sizes) > 1 else ''}. Change one of them."
        )
    if name == "NO_SHARD" and sizes is not None and sizes[1] != 1:
        raise ValueError(
            f"`FSDPStrategy(sharding_strategy='NO_SHARD', device_mesh={sizes})` shards over {sizes[1]} ranks."
            " Write 'HYBRID_SHARD' for copies that are sharded, or leave `device_mesh` out."
        )
    return layout


def _name_of(strategy: Any) -> str:
    """The name of a strategy given in any case, or as a member of `torch.distributed.fsdp.ShardingStrategy`."""
    name = str(getattr(strategy, "name", strategy)).upper()
    if name not in STRATEGIES:
        raise ValueError(
            f"`FSDPStrategy(sharding_strategy={strategy!r})` is not known."
            f" Choose one of {', '.join(map(repr, STRATEGIES))}."
        )
    return name


def _reshard_of(name: str, is_said: bool, reshard: bool | int | None) -> bool | int:
    frees = name in ("FULL_SHARD", "HYBRID_SHARD")
    if reshard is None:
        return frees
    if is_said and (reshard is not False) != frees and name != "HYBRID_SHARD":
        raise ValueError(
            f"`FSDPStrategy(sharding_strategy={name!r}, reshard_after_forward={reshard!r})` contradict each other:"
            f" {name!r} means {frees}. Leave one of them out."
        )
    return reshard


def _sizes_of(mesh: Any) -> tuple[int, ...] | None:
    if mesh is None:
        return None
    sizes = getattr(mesh, "shape", mesh)
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not all(map(_is_size, sizes)):
        raise TypeError(
            f"`FSDPStrategy(device_mesh={mesh!r})` takes sizes such as `(2, 4)`, for 2 copies of the model, each of"
            " which is sharded over 4 ranks; or a `torch.distributed.DeviceMesh`."
        )
    if len(sizes) not in (1, 2):
        raise ValueError(
            f"`FSDPStrategy(device_mesh=...)` takes one or two dimensions, but got {len(sizes)}: {tuple(sizes)}."
            " For tensor parallel use `ModelParallelStrategy`."
        )
    if not isinstance(mesh, Sequence) and len(sizes) == 2 and mesh.mesh_dim_names is None:
        raise ValueError(
            "`FSDPStrategy(device_mesh=...)` takes a mesh of two dimensions only with names. Pass"
            " `mesh_dim_names=('replicate', 'shard')` to `init_device_mesh`."
        )
    return tuple(sizes)


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0
