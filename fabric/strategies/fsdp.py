# SPDX-License-Identifier: Apache-2.0
"""Parameters, gradients and optimizer states split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from torch.nn import Module
from typing_extensions import override

from fabric.strategies.sharded import ShardedStrategy
from fabric.strategies.sharding.apply import refuse_sharded
from fabric.strategies.sharding.layout import Layout, validated_layout
from fabric.strategies.sharding.mesh import MeshSizes
from fabric.strategies.sharding.options import Accumulation, validated_arguments
from fabric.strategies.sharding.units import Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


class FSDPStrategy(ShardedStrategy):
    """`torch.distributed.fsdp.fully_shard`: each rank keeps a part of every parameter and gathers a block to use it.

    Args:
        auto_wrap_policy: What is gathered and freed as a unit: module classes, or a function that is given a submodule
            and says whether it is one; PyTorch's own policies too. By default the model's repeated blocks.
        activation_checkpointing_policy: What computes its activations again in backward, given likewise; by default
            nothing.
        sharding_strategy: `FULL_SHARD` (the default); `SHARD_GRAD_OP`, where parameters stay gathered between forward
            and backward; `HYBRID_SHARD`, where groups of ranks (by default those of a machine) each hold all of the
            model; `NO_SHARD`, where every rank does.
        reshard_after_forward: Whether units are freed between forward and backward; a number shards them over so many
            ranks meanwhile. By default what `sharding_strategy` says.
        cpu_offload: Whether shards are kept, and updated, in main memory; or a
            `torch.distributed.fsdp.CPUOffloadPolicy`.
        mixed_precision: A `torch.distributed.fsdp.MixedPrecisionPolicy`; by default what the precision says.
        device_mesh: Sizes `(copies, shards)`, or `(shards,)`, that multiply to the number of ranks; or a `DeviceMesh`
            of one or two dimensions, of which of two the first replicates.
        state_dict_type: Whether checkpoints are `sharded` folders or `full` files. Both are read.
        accumulation: What `fabric.no_backward_sync` leaves unsent: with `unsharded` all, while each rank keeps whole
            gradients; `sharded` saves that memory: gradients are reduced to shards in each backward, and only copies of
            the model (of `HYBRID_SHARD`) are not added up.
        process_group_backend: `nccl`, `gloo`, ...; by default what suits the accelerator.
        timeout: How long a collective may wait for the other ranks; by default 30 minutes.
        start_method: How the ranks of a machine start: `subprocess`, `spawn`, `fork` or `forkserver`.
        **fsdp_kwargs: Further arguments of `fully_shard`: `shard_placement_fn` and `ignored_params`.

    Example:
        >>> import torch
        >>> from fabric.strategies import FSDPStrategy
        >>> strategy = FSDPStrategy(auto_wrap_policy={torch.nn.TransformerEncoderLayer}, cpu_offload=True)
    """

    def __init__(
        self,
        *,
        auto_wrap_policy: Policy | type[Module] | None = None,
        activation_checkpointing_policy: Policy | type[Module] | None = None,
        sharding_strategy: str | None = None,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool | OffloadPolicy = False,
        mixed_precision: MixedPrecisionPolicy | None = None,
        device_mesh: DeviceMesh | Sequence[int] | None = None,
        state_dict_type: Literal["full", "sharded"] = "sharded",
        accumulation: Accumulation = "unsharded",
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "subprocess",
        **fsdp_kwargs: Any,
    ) -> None:
        self.layout: Layout = validated_layout(sharding_strategy, reshard_after_forward, device_mesh)
        arguments = validated_arguments(
            "FSDPStrategy",
            others=fsdp_kwargs,
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            reshard_after_forward=self.layout.reshard_after_forward,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            accumulation=accumulation,
        )
        super().__init__(
            sharding=arguments,
            state_dict_type=state_dict_type,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    @override
    def choose_sizes(self) -> MeshSizes:
        local = self.environment.local_world_size()
        copies, shards = self.layout.sizes(self.world_size, local)
        return MeshSizes(replicate=copies, data=shards, hybrid=self.layout.is_hybrid)

    @override
    def build_mesh(self, sizes: MeshSizes) -> DeviceMesh:
        mesh, kind = self.layout.mesh, self.root_device.type
        if mesh is not None and mesh.device_type != kind:
            raise ValueError(
                f"`FSDPStrategy(device_mesh=...)` got a mesh of {mesh.device_type!r} devices, but this run is on"
                f" {kind!r}. Make it by `init_device_mesh({kind!r}, ...)`."
            )
        if mesh is not None:
            return mesh
        return sizes.build(self.root_device.type, self.timeout, tensor_dimension=False)

    @property
    @override
    def has_users_mesh(self) -> bool:
        return self.layout.mesh is not None

    @override
    def setup_module(self, module: Module) -> Module:
        refuse_sharded(module)
        with self.started(module):
            return self.shard(module)
