# SPDX-License-Identifier: Apache-2.0
"""Layers, sequences and parameters split over one mesh of ranks."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from fabric.strategies.context import ContextMethod, ContextParallel, create_context, validated_method
from fabric.strategies.entry import _Entry
from fabric.strategies.sharded import ShardedStrategy
from fabric.strategies.sharding.adopted import adopt_module
from fabric.strategies.sharding.apply import refuse_sharded, sharded_parts
from fabric.strategies.sharding.mesh import MeshSizes, Size, choose_tensor_size, divide, release_groups
from fabric.strategies.sharding.options import Accumulation, validated_arguments
from fabric.strategies.sharding.tensor import ParallelizeFn, align_gradients, parallelize
from fabric.strategies.sharding.units import Policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

_CALL = "ModelParallelStrategy"


class ModelParallelStrategy(ShardedStrategy):
    """Tensor, context and fully sharded data parallel on one mesh of ranks, in any combination.

    The mesh, `fabric.strategy.device_mesh`, has the dimensions `data_parallel` and `tensor_parallel`; with
    `replicate_size` above 1, `replicate`, `shard` and `tensor_parallel`. Context ranks count as `data_parallel` (or
    `shard`) there, since they hold equal parameters. Neighbouring ranks are in the same tensor group.

    Args:
        parallelize_fn: Splits the layers of a model: it is given the user's model, on each rank, and the mesh, changes
            the model in place and returns it. `torch.distributed.tensor.parallel.parallelize_module(module,
            device_mesh["tensor_parallel"], plan)` is what it usually calls. It may apply `fully_shard` too; otherwise
            the strategy does so afterwards, where there is more than one rank to shard over.
        data_parallel_size: Ranks over which parameters are sharded and that read different data; "auto" takes those
            that the other sizes leave.
        tensor_parallel_size: Ranks that share a batch and have different parts of each layer; "auto" is 1 without a
            `parallelize_fn`, and else takes those that the other sizes leave. With both sizes "auto" a tensor group is
            a machine, or the largest part of one that fits.
        context_parallel_size: Ranks that share a batch and have different parts of its sequences; see
            `fabric.context_parallel`.
        replicate_size: Copies of the whole sharded model, whose gradients are averaged: hybrid sharding.
        context_parallel_method: How attention spans context ranks: `ring` (CUDA), `exchange`, or `auto`.
        auto_wrap_policy: What is sharded as a unit, where there is more than one rank to shard over; see
            `FSDPStrategy` for this and the next ones.
        activation_checkpointing_policy: What computes its activations again in backward; by default nothing.
        reshard_after_forward: Whether units are freed between forward and backward; a number shards them over so many
            ranks meanwhile.
        cpu_offload: Whether shards are kept, and updated, in main memory.
        mixed_precision: A `torch.distributed.fsdp.MixedPrecisionPolicy`; by default what the precision says.
        state_dict_type: Whether checkpoints are `sharded` folders or `full` files. Both are read.
        accumulation: What `fabric.no_backward_sync` leaves unsent: `unsharded` or `sharded`.
        process_group_backend: `nccl`, `gloo`, ...; by default what suits the accelerator.
        timeout: How long a collective may wait for the other ranks; by default 30 minutes.
        start_method: How the ranks of a machine start: `subprocess`, `spawn`, `fork` or `forkserver`.

    Raises:
        ValueError: If a size is no number of ranks, or layers shall be split and nothing says how.
        TypeError: If an argument is of the wrong type.

    Example:
        >>> from fabric.strategies import ModelParallelStrategy
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        >>> def split(model, mesh):
        ...     plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        ...     return parallelize_module(model, mesh["tensor_parallel"], plan)
        >>> strategy = ModelParallelStrategy(split, tensor_parallel_size=2)
    """

    def __init__(
        self,
        parallelize_fn: ParallelizeFn | None = None,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        context_parallel_size: int = 1,
        replicate_size: int = 1,
        *,
        context_parallel_method: ContextMethod = "auto",
        auto_wrap_policy: Policy | type[Module] | None = None,
        activation_checkpointing_policy: Policy | type[Module] | None = None,
        reshard_after_forward: bool | int = True,
        cpu_offload: bool | OffloadPolicy = False,
        mixed_precision: MixedPrecisionPolicy | None = None,
        state_dict_type: Literal["full", "sharded"] = "sharded",
        accumulation: Accumulation = "unsharded",
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "subprocess",
    ) -> None:
        arguments = validated_arguments(
            _CALL,
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            reshard_after_forward=reshard_after_forward,
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
        self._asked = _validated_sizes(
            replicate_size=replicate_size,
            data_parallel_size=data_parallel_size,
            context_parallel_size=context_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
        )
        _validate_parallelize_fn(parallelize_fn, tensor_parallel_size)
        self._parallelize_fn = parallelize_fn
        self._context_method = validated_method(_CALL, context_parallel_method)
        self._context_mesh: DeviceMesh | None = None
        self._context: ContextParallel | None = None
        self._has_split = False

    # the mesh

    @override
    def choose_sizes(self) -> MeshSizes:
        machines = self.environment.num_nodes()
        return resolve_sizes(self._asked, self.world_size, machines, splits=self._parallelize_fn is not None)

    @override
    def build_mesh(self, sizes: MeshSizes) -> DeviceMesh:
        device_type = self.root_device.type
        self._context_mesh = sizes.build_context(device_type, self.timeout) if sizes.context > 1 else None
        return sizes.build(device_type, self.timeout, tensor_dimension=True)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._has_split = False
        if self._context_mesh is not None:
            self._context = create_context(self._context_mesh, self._context_method)

    @override
    def teardown(self) -> None:
        if self._context_mesh is not None:
            release_groups(self._context_mesh)
        self._context = self._context_mesh = None
        super().teardown()

    # sequences

    @property
    def context_mesh(self) -> DeviceMesh | None:
        """The mesh `context_parallel` of this rank; None without context parallelism."""
        return self._context_mesh

    @property
    @override
    def context_parallel_size(self) -> int:
        return self.sizes.context

    @override
    def context_parallel(self, tensors: Any, seq_dims: Any) -> AbstractContextManager[Any]:
        if self._context is None:
            return super().context_parallel(tensors, seq_dims)
        return self._context.divide(tensors, seq_dims)

    @override
    def gather_sequence(self, tensor: Tensor, dim: int) -> Tensor:
        if self._context is None:
            return super().gather_sequence(tensor, dim)
        return self._context.gather(tensor, dim)

    # layers and parameters

    @override
    def setup_module(self, module: Module) -> Module:
        refuse_sharded(module)
        name = type(module).__name__  # `fully_shard` changes it
        with self.started(module):
            if self._parallelize_fn is not None:
                self._split_layers(module, name, self._parallelize_fn)
            if sharded_parts(module):
                self._refuse_options(name)
                self._rows.append(("sharded", f"{name}: by `fully_shard`", "parallelize_fn"))
                entry = adopt_module(module, self.sharding_mesh)
            elif self.sharding_mesh.size() > 1 or self._has_use_of_one_shard:
                return self.shard(module)
            else:
                entry = _Entry(module)
        if not sharded_parts(entry):
            with self.parameters.follow(module):
                module.to(self.root_device)  # what was left whole; `fully_shard` moves it otherwise
        self.adopt(entry, module)
        return entry

    @property
    def _has_use_of_one_shard(self) -> bool:
        """Whether there is something to do for `fully_shard` where it divides nothing."""
        sharding = self.sharding
        wanted = (sharding.cpu_offload, sharding.mixed_precision, sharding.activation_checkpointing_policy)
        return any(option not in (False, None) for option in wanted)

    def _refuse_options(self, owner: str) -> None:
        """What the user's own `fully_shard` has decided already can't be said here as well."""
        sharding = self.sharding
        given = {
            "auto_wrap_policy": sharding.auto_wrap_policy is not None,
            "activation_checkpointing_policy": sharding.activation_checkpointing_policy is not None,
            "reshard_after_forward": sharding.reshard_after_forward is not True,
            "cpu_offload": sharding.cpu_offload is not False,
            "mixed_precision": sharding.mixed_precision is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise ValueError(
                    f"`{_CALL}({name}=...)` says how to shard `{owner}`, but `parallelize_fn` has"
                    f" applied `fully_shard` to it. Leave `{name}` out, or leave `fully_shard` to the strategy."
                )

    def _split_layers(self, module: Module, name: str, function: ParallelizeFn) -> None:
        split = parallelize(module, function, self.device_mesh)
        count = sum(1 for _ in module.parameters())
        if self.sizes.tensor > 1 and count and not split and not self._has_split:
            raise ValueError(
                f"`{_CALL}(parallelize_fn=...)` split no parameter of `{name}` over the {self.sizes.tensor} ranks of"
                " `device_mesh['tensor_parallel']`. Name its layers in the plan, as `model.named_modules()` does, or"
                " set up a model that is split before one that is not."
            )
        self._has_split = self._has_split or split > 0
        value = f"{name}: {split} of {count} parameters, over {self.sizes.tensor} ranks"
        self._rows.append(("split", value, "parallelize_fn"))

    # one step

    @override
    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        align_gradients(optimizer)
        return super().optimizer_step(optimizer, **kwargs)

    @override
    def clip_gradients_norm(self, module: Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        align_gradients(optimizer)
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        align_gradients(optimizer)
        super().clip_gradients_value(module, optimizer, clip_val)

    @override
    def syncs_backward(self, module: Module) -> bool:
        return self.sizes.tensor > 1 or super().syncs_backward(module)


def resolve_sizes(asked: dict[str, Size], world_size: int, machines: int, *, splits: bool) -> MeshSizes:
    """How the ranks of a job are divided.

    Args:
        asked: The four sizes by argument, outermost first.
        world_size: Number of ranks.
        machines: Number of machines.
        splits: Whether there is something that splits layers.

    Raises:
        ValueError: If they do not multiply to the world size.
    """
    sizes = dict(asked)
    if sizes["tensor_parallel_size"] == "auto":
        if not splits:
            sizes["tensor_parallel_size"] = 1
        elif sizes["data_parallel_size"] == "auto":
            others = math.prod(size for size in sizes.values() if isinstance(size, int))
            sizes["tensor_parallel_size"] = choose_tensor_size(world_size, machines, others)
    replicate, data, context, tensor = divide(_CALL, world_size, sizes).values()
    return MeshSizes(replicate, data, context, tensor, hybrid=replicate > 1)


def _validated_size(name: str, size: Any, *, auto: bool = False) -> Any:
    if (auto and size == "auto") or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size
    choices = "1 or more, or 'auto'" if auto else "1 or more"
    raise ValueError(f"`{_CALL}({name}={size!r})` is not a number of ranks. Write {choices}.")


def _validated_sizes(**sizes: Any) -> dict[str, Size]:
    """The sizes by their arguments; those of data and tensors may be "auto"."""
    may_be_auto = ("data_parallel_size", "tensor_parallel_size")
    return {name: _validated_size(name, size, auto=name in may_be_auto) for name, size in sizes.items()}


def _validate_parallelize_fn(function: Any, tensor_parallel_size: Any) -> None:
    if function is not None and not callable(function):
        raise TypeError(
            f"`{_CALL}(parallelize_fn={function!r})` is not a function. Pass one that is given the model and the mesh,"
            " splits the model's layers and returns it."
        )
    if function is None and tensor_parallel_size not in ("auto", 1):
        raise ValueError(
            f"`{_CALL}(tensor_parallel_size={tensor_parallel_size})` needs to know how to split the layers."
            " Pass `parallelize_fn=` too: a function of the model and the mesh that calls"
            " `torch.distributed.tensor.parallel.parallelize_module`."
        )
