# SPDX-License-Identifier: Apache-2.0
"""What all strategies share that split parameters over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from fabric.checkpoint.state.shards import whole
from fabric.plugins.precision import FSDPPrecision, Precision
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.reduction import ReduceOp
from fabric.strategies.sharding.apply import (
    ShardingOptions,
    drop_unsent_gradients,
    gather_nothing,
    reset_after_error,
    shard_module,
    sharded_parts,
)
from fabric.strategies.sharding.checkpointing import checkpoint_activations
from fabric.strategies.sharding.clipping import (
    clip_by_norm,
    clip_by_value,
    dtype_of_gradients,
    refuse_nonfinite,
    total_norm,
)
from fabric.strategies.sharding.materialise import started_context
from fabric.strategies.sharding.mesh import MeshSizes, forget_former_meshes, release_groups
from fabric.strategies.sharding.optimizers import shard_state, validate_alike, validate_owned
from fabric.strategies.sharding.options import ShardingArguments, validated_state_dict_type
from fabric.strategies.sharding.replicas import replicas_of
from fabric.strategies.sharding.rows import rows_of
from fabric.strategies.sharding.units import find_units, uncompiled, without_tied
from fabric.utilities.parameter_names import plain_name
from fabric.utilities.recording import Recording, recording_context

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedStrategy(ParallelStrategy, ABC):
    """Parameters, gradients and optimizer states are `DTensor`s on a mesh of ranks.

    Args:
        sharding: What is sharded, and how; by default repeated blocks as units.
        state_dict_type: `sharded` writes checkpoints as folders to which each rank adds its part, `full` as one file.
        **kwargs: What `ParallelStrategy` takes.
    """

    shards_parameters = True
    accelerators = ("cpu", "cuda")
    starts_on_meta = True

    def __init__(
        self,
        *,
        sharding: ShardingArguments | None = None,
        state_dict_type: Literal["full", "sharded"] = "sharded",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        sharding = sharding or ShardingArguments(type(self).__name__)
        self.state_dict_type = validated_state_dict_type(sharding.call, state_dict_type)
        self.sharding = sharding
        self._mesh: DeviceMesh | None = None
        self._sizes: MeshSizes | None = None
        self._rows: list[tuple[str, str, str]] = []
        self._recordings: list[Recording] = []  # of the constructors that ran on the meta device

    @abstractmethod
    def choose_sizes(self) -> MeshSizes:
        """How the ranks are divided; runs in `bind`, when the number of ranks is known, alike on every rank."""

    @abstractmethod
    def build_mesh(self, sizes: MeshSizes) -> DeviceMesh:
        """The mesh on which parameters lie; runs once at `launch`, on every rank."""

    @override
    def bind(self, **choices: Any) -> None:
        super().bind(**choices)
        self._sizes = self.choose_sizes()  # sizes that do not fit raise now, before any process starts

    @property
    def sizes(self) -> MeshSizes:
        """How the ranks are divided."""
        if self._sizes is None:
            raise self._unbound()
        return self._sizes

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh on which parameters lie; see the strategy for the names of its dimensions."""
        if self._mesh is None:
            name = type(self).__name__
            raise RuntimeError(f"`{name}.device_mesh` is made by `fabric.launch()`. Call that first.")
        return self._mesh

    @property
    def has_users_mesh(self) -> bool:
        """Whether `device_mesh` was made by the user, who may go on with it where the process group does."""
        return False

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The dimensions of `device_mesh` over which `fully_shard` splits and replicates."""
        mesh = self.device_mesh
        names = tuple(name for name in mesh.mesh_dim_names or () if name != "tensor_parallel")
        return mesh if names == mesh.mesh_dim_names else mesh[names]

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups of ranks, that read different data."""
        return self.sizes.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data this rank reads."""
        return self.sizes.data_parallel_rank(self.global_rank)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @override
    def create_precision(self, name: str, device_type: str) -> Precision:
        if name in ("16-mixed", "bf16-mixed"):
            return FSDPPrecision(name, device_type)  # type: ignore[arg-type]
        return super().create_precision(name, device_type)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        forget_former_meshes()
        self._mesh = self.build_mesh(self.sizes)
        self._rows = []
        # What `setup_module` returned, with the user's module (held weakly too: after a forward its blocks know what is
        # around them) and how many `no_backward_sync` are open around it. Made here, since a strategy that waits for
        # its processes to be spawned is pickled.
        self._entries: WeakKeyDictionary[Module, ref[Module]] = WeakKeyDictionary()
        self._unsynced: WeakKeyDictionary[Module, int] = WeakKeyDictionary()

    @override
    def teardown(self) -> None:
        if self._mesh is not None and (self._owns_group or not self.has_users_mesh):
            release_groups(self._mesh)
        self._mesh = None
        self._recordings.clear()
        super().teardown()

    # create

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Modules are created on the CPU, from where each unit goes to the device when it is sharded.

        Args:
            empty_init: True creates them on the meta device, and notes what their constructors do.
        """
        return self._recording_context() if empty_init else torch.device("cpu")

    @contextmanager
    def _recording_context(self) -> Iterator[None]:
        with recording_context() as recording:
            yield
        self._recordings.append(recording)

    @property
    def shard_device(self) -> torch.device:
        """Where shards are kept."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        offload = self.sharding.offload_policy(self.root_device.type)
        return torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else self.root_device

    @contextmanager
    def started(self, module: Module) -> Iterator[None]:
        """Gives a model its values while it is sharded inside, and follows its parameters; see `started_context`."""
        with (
            self.parameters.follow(module),
            started_context(module, self._recordings, self.root_device, self.shard_device),
        ):
            yield

    # make it parallel

    def shard(self, module: Module, *, reshard_after_forward: bool | int | None = None) -> Module:
        """Shard a module in place over `sharding_mesh`, by units; what is returned is called in forward.

        Args:
            module: The user's.
            reshard_after_forward: In the place of the argument of that name.
        """
        sharding, call = self.sharding, self.sharding.call
        units = find_units(module, sharding.auto_wrap_policy, f"{call}(auto_wrap_policy=...)")
        units = without_tied(module, units)
        again = None
        if sharding.activation_checkpointing_policy is not None:
            argument = f"{call}(activation_checkpointing_policy=...)"
            again = find_units(module, sharding.activation_checkpointing_policy, argument)
            checkpoint_activations(list(again.modules.values()))
        options = self._options(reshard_after_forward)
        self._rows += rows_of(module, units, again, options)
        for parameter in sharding.others.get("ignored_params") or ():
            parameter.data = parameter.data.to(self.root_device)  # `fully_shard` leaves them where they are
        with self.parameters.follow(module):
            entry = shard_module(module, units, options)
        self.adopt(entry, module)
        return entry

    def adopt(self, entry: Module, module: Module) -> None:
        """Note a module that is set up; every `setup_module` ends with it.

        Args:
            entry: What is called in forward.
            module: The user's.
        """
        self._entries[entry] = ref(module)

    def _modules(self) -> Iterator[tuple[Module, Module]]:
        """What is called in forward, and the user's module, for each that is set up."""
        for entry, held in list(self._entries.items()):
            if (module := held()) is not None:
                yield entry, module

    def _options(self, reshard_after_forward: bool | int | None) -> ShardingOptions:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        sharding, mesh, precision = self.sharding, self.sharding_mesh, self.precision
        mixed = sharding.mixed_precision
        by_precision = False
        if mixed is None and isinstance(precision, FSDPPrecision):
            mixed, by_precision = precision.mixed_precision_policy, True
        mixed = mixed or MixedPrecisionPolicy()
        reshard = sharding.finest(mesh.size(mesh.ndim - 1)) if reshard_after_forward is None else reshard_after_forward
        offload = sharding.offload_policy(self.root_device.type)
        return ShardingOptions(mesh, reshard, mixed, offload, with_autocast=by_precision, others=sharding.others)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        for entry, module in self._modules():
            with self.parameters.follow(module):  # it may have been made between a forward and its backward
                gather_nothing(entry)
        self.parameters.repoint(optimizer)
        validate_owned(optimizer, {id(p) for _, module in self._modules() for p in module.parameters()})
        validate_alike(optimizer)
        shard_state(optimizer)
        return optimizer

    @override
    def setup_rows(self) -> list[tuple[str, str, str]]:
        return self._rows

    # one step

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        try:
            self._precision.backward(tensor, module, *args, **kwargs)
        except BaseException:
            for entry in self._entries if module is None else (module,):
                reset_after_error(entry)
            raise

    @override
    @contextmanager
    def no_backward_sync(self, module: Module, enabled: bool = True) -> Iterator[None]:
        entry = uncompiled(module)
        if not enabled:
            yield
            return
        depth = self._unsynced.get(entry, 0)
        self._unsynced[entry] = depth + 1
        self._set_sync(entry, False)
        try:
            yield
        finally:
            self._unsynced[entry] = depth
            self._set_sync(entry, depth == 0)

    def _set_sync(self, entry: Any, enabled: bool) -> None:
        """What backward sends; it never leaves parameters gathered, since an optimizer would then train nothing."""
        for part in sharded_parts(entry):
            if self.sharding.accumulation == "sharded":
                part.set_requires_all_reduce(enabled, recurse=False)
            else:
                part.set_requires_gradient_sync(enabled, recurse=False)

    @override
    def drop_unsent(self, parameters: Iterable[Tensor]) -> None:
        chosen = {id(parameter) for parameter in parameters} if self._unsynced else set()
        for entry in self._unsynced:
            drop_unsent_gradients(entry, chosen)

    @override
    def syncs_backward(self, module: Module) -> bool:
        return self.world_size > 1 and bool(sharded_parts(module))  # even without gradients, parameters are gathered

    @property
    @override
    def replica_ranks(self) -> tuple[int, ...]:
        if not self.sizes.hybrid:
            return (self.global_rank,)
        return tuple(dist.get_process_group_ranks(self.device_mesh.get_group(0)))

    @override
    def replicas_of(self, tensor: Tensor) -> tuple[int, ...]:
        return replicas_of(tensor, self.device_mesh)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self._precision.unscale_gradients(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        total = total_norm(parameters, norm_type, self.root_device).to(dtype_of_gradients(parameters))
        if error_if_nonfinite and not self._precision.skips_nonfinite_steps:
            refuse_nonfinite(total, norm_type)
        clip_by_norm(parameters, max_norm, total)
        return total

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        self._precision.unscale_gradients(optimizer)
        clip_by_value([parameter for group in optimizer.param_groups for parameter in group["params"]], clip_val)

    # talk to the other ranks

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False, pad_value: float | None = None
    ) -> Tensor:
        return super().all_gather(whole(tensor), group, sync_grads, pad_value)

    @override
    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: ReduceOp = "mean") -> Tensor:
        return super().all_reduce(whole(tensor), group, reduce_op)

    # state

    @override
    def parameter_names(self, optimizer: Optimizer) -> list[list[str]] | None:
        modules = [module for _, module in self._modules()]
        names = {
            id(parameter): plain_name(name) if len(modules) == 1 else f"{index}.{plain_name(name)}"
            for index, module in enumerate(modules)
            for name, parameter in module.named_parameters()
        }
        groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if not all(parameter in names for group in groups for parameter in group):
            return None
        return [[names[parameter] for parameter in group] for group in groups]
