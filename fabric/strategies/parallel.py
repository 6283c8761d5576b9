# SPDX-License-Identifier: Apache-2.0
"""What all strategies with several processes share: the process group and the collectives."""

from abc import ABC
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from fabric.strategies.padding import padded_to, validate_pad_value
from fabric.strategies.reduction import ReduceOp, copied, finished, validated
from fabric.strategies.strategy import Strategy
from fabric.utilities.apply_func import apply_to_tensors

T = TypeVar("T")

_REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
# The others (int16, uint16, float8, ...) no backend, or not each, can send; they travel as bytes.
_SENDABLE = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)
_MAX_DIMS = 8  # so many dimensions of a shape are compared over the ranks


class ParallelStrategy(Strategy, ABC):
    """Several processes in one `torch.distributed` process group.

    Args:
        process_group_backend: `nccl`, `gloo`, ...; by default what suits the accelerator.
        timeout: How long a collective may wait for the other ranks.
        start_method: How the ranks of a machine start: `subprocess`, `spawn`, `fork` or `forkserver`.
    """

    one_process_per_device = True
    start_method: str | None = "subprocess"

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "subprocess",
    ) -> None:
        super().__init__()
        choices = ("subprocess", "spawn", "fork", "forkserver")
        if start_method not in choices:
            raise ValueError(
                f"`{type(self).__name__}(start_method={start_method!r})` is not a way to start processes."
                f" Choose one of {', '.join(choices)}."
            )
        self.start_method = start_method
        self.interactive_compatible = start_method == "fork"
        self.timeout = timeout or timedelta(minutes=30)
        self._backend = process_group_backend
        self._owns_group = False
        self._decisions: ref[dist.ProcessGroup] | None = None  # weakly, so that leaving it waits for what is under way

    @property
    def process_group_backend(self) -> str:
        """The backend of the process group."""
        return self._backend or self.accelerator.process_group_backend

    @property
    @override
    def root_device(self) -> torch.device:
        return self.devices[self.local_rank]

    @property
    @override
    def world_size(self) -> int:
        return self.environment.world_size()

    @property
    @override
    def global_rank(self) -> int:
        return self.environment.global_rank()

    @property
    @override
    def local_rank(self) -> int:
        return self.environment.local_rank()

    @property
    @override
    def node_rank(self) -> int:
        return self.environment.node_rank()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if dist.is_initialized():
            self._validate_existing_group()
            return
        device = self.root_device
        dist.init_process_group(
            self.process_group_backend,
            store=self.environment.join(self.timeout),
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self.timeout,
            device_id=device if self.process_group_backend == "nccl" else None,
        )
        if self.process_group_backend == "gloo":
            dist.barrier()  # a rank that left at once would break the connections that the others still make
        self._owns_group = True

    def _validate_existing_group(self) -> None:
        if dist.get_world_size() != self.world_size:
            raise RuntimeError(
                f"`Fabric` asks for {self.world_size} processes, but this process already belongs to a job of"
                f" {dist.get_world_size()}. A process launches once: give both `Fabric` objects the same `devices=` and"
                " `num_nodes=`, or call `teardown()` on the first one."
            )

    @override
    def teardown(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._decisions = None
        self.environment.teardown()
        super().teardown()

    @override
    def barrier(self, name: str | None = None) -> None:
        device_ids = [self.root_device.index] if self.root_device.type == "cuda" else None
        dist.barrier(device_ids=device_ids)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        box = [obj]
        dist.broadcast_object_list(box, src)
        return self._tensors_to_own_device(box[0])

    @override
    def gather_objects(self, obj: T) -> list[T]:
        objects: list[Any] = [None] * self.world_size
        dist.all_gather_object(objects, obj)
        return self._tensors_to_own_device(objects)

    def _tensors_to_own_device(self, obj: T) -> T:
        """Pickled tensors come back on the device of the rank that sent them."""
        if self.root_device.type == "cpu":
            return obj
        own = self.root_device
        moved = apply_to_tensors(obj, lambda tensor: tensor.to(own) if tensor.device.type == own.type else tensor)
        return cast(T, moved)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False, pad_value: float | None = None
    ) -> Tensor:
        if self.world_size == 1:
            return tensor
        if pad_value is None:
            _validate_same_shape("all_gather", tensor, group)
        else:
            tensor = _padded_to_the_largest(tensor, group, pad_value)
        if sync_grads and tensor.requires_grad:
            return _AllGather.apply(tensor, group)  # type: ignore[no-any-return]
        return _gather(tensor, group)

    @override
    def gather_alike(self, tensor: Tensor) -> Tensor:
        return tensor if self.world_size == 1 else _gather(tensor, None)

    @override
    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: ReduceOp = "mean") -> Tensor:
        operation = validated(reduce_op)
        total = copied(tensor, operation)
        _validate_same_shape("all_reduce", total, group)
        dist.all_reduce(total, op=_REDUCE_OPS[operation], group=group)
        return finished(total, operation, dist.get_world_size(group))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        vote = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(vote)

    @override
    def start_boolean_decision(self, decision: bool, all: bool = True) -> Callable[[], bool]:
        vote = torch.tensor(int(decision))
        operation = dist.ReduceOp.MIN if all else dist.ReduceOp.MAX
        work = dist.all_reduce(vote, op=operation, group=self._cpu_group, async_op=True)

        def decided() -> bool:
            work.wait()
            return bool(vote)

        return decided

    @property
    @override
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        return None if self.process_group_backend == "gloo" else self._cpu_group

    @override
    def create_cpu_group(self) -> dist.ProcessGroup | None:
        return dist.new_group(backend="gloo", timeout=self.timeout) if self.world_size > 1 else None

    @property
    def _cpu_group(self) -> dist.ProcessGroup:
        """All ranks, over gloo: its collectives neither occupy the device nor wait for the training's own."""
        group = None if self._decisions is None else self._decisions()
        if group is None:
            group = dist.new_group(backend="gloo", timeout=self.timeout)
            self._decisions = ref(group)
        return group


def _validate_same_shape(call: str, tensor: Tensor, group: Any) -> None:
    """Unlike tensors hang, or end the process group with a message about bytes; say what differs instead."""
    ranks = _shapes_of_ranks(tensor, group)
    if any(other != ranks[0] for other in ranks):
        raise ValueError(
            f"`fabric.{call}(...)` needs tensors of one shape and dtype on all ranks, but got {_describe_all(ranks)}."
            f" Pad them to the same shape first{', or pass `pad_value=`' if call == 'all_gather' else ''}."
        )


def _padded_to_the_largest(tensor: Tensor, group: Any, value: float) -> Tensor:
    ranks = _shapes_of_ranks(tensor, group)
    if any(other[:2] != ranks[0][:2] for other in ranks):
        raise ValueError(
            f"`fabric.all_gather(..., pad_value={value!r})` needs tensors of one dtype and number of dimensions on all"
            f" ranks, but got {_describe_all(ranks)}. Convert or reshape them first."
        )
    validate_pad_value("all_gather", tensor.dtype, value)
    largest = [max(sizes) for sizes in zip(*(shape[2:] for shape in ranks), strict=True)]
    return padded_to(tensor, [*largest[: tensor.dim()], *tensor.shape[_MAX_DIMS:]], value)


def _shapes_of_ranks(tensor: Tensor, group: Any) -> list[list[int]]:
    """For each rank: the number of the dtype, the number of dimensions, and the shape, filled up with zeros."""
    own = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape[:_MAX_DIMS]]
    own += [0] * (_MAX_DIMS + 2 - len(own))
    ranks: list[list[int]] = _gather(torch.tensor(own, device=tensor.device), group).tolist()
    return ranks


def _describe_all(ranks: list[list[int]]) -> str:
    return "; ".join(f"rank {n}: {_describe(code, shape[:dim])}" for n, (code, dim, *shape) in enumerate(ranks))


def _describe(code: int, shape: list[int]) -> str:
    return f"{str(_DTYPES[code]).removeprefix('torch.')} {shape}"


def _gather(tensor: Tensor, group: Any) -> Tensor:
    tensor = tensor.detach().contiguous()
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    parts = list(gathered.unbind())
    if tensor.dtype not in _SENDABLE:
        tensor, *parts = (part.reshape(-1).view(torch.uint8) for part in (tensor, *parts))
    dist.all_gather(parts, tensor, group=group)
    return gathered


class _AllGather(torch.autograd.Function):
    """Gather whose backward gives each rank the sum of all ranks' gradients for what it contributed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None
