# SPDX-License-Identifier: Apache-2.0
"""One process per device, each with a full copy of the module."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from fabric.strategies.buckets import can_settle, settle
from fabric.strategies.entry import _Entry
from fabric.strategies.parallel import ParallelStrategy

Hook = Callable[..., Any]

# With the first one `DistributedDataParallel` keeps its first buckets; with the others it is not known how it behaves.
_OWN_BUCKETS = ("find_unused_parameters", "static_graph", "mixed_precision", "delay_all_reduce_named_params")


class DDPStrategy(ParallelStrategy):
    """`DistributedDataParallel`: each rank has a copy of the module, and gradients are averaged during backward.

    Args:
        find_unused_parameters: For models in which a step may leave parameters without a gradient.
        static_graph: Promise that each step uses the same parameters, which lets PyTorch plan ahead.
        gradient_as_bucket_view: Let gradients live in the communication buckets, which saves a copy of them.
        broadcast_buffers: Whether rank 0's buffers (batch statistics) go to all ranks before each forward.
        ddp_comm_hook: How gradients travel, such as
            `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook`.
        ddp_comm_state: The state that the hook is given, such as a `PowerSGDState`.
        ddp_comm_wrapper: Wraps the hook, such as `default_hooks.fp16_compress_wrapper`.
        process_group_backend: `nccl`, `gloo`, ...; by default what suits the accelerator.
        timeout: How long a collective may wait for the other ranks; by default 30 minutes.
        start_method: How the ranks of a machine start: `subprocess`, `spawn`, `fork` or `forkserver`.
        **ddp_kwargs: Anything else that `torch.nn.parallel.DistributedDataParallel` takes, such as `bucket_cap_mb`.
    """

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        ddp_comm_hook: Hook | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Callable[[Hook], Hook] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "subprocess",
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        if ddp_comm_hook is None and (ddp_comm_state is not None or ddp_comm_wrapper is not None):
            raise ValueError(
                "`DDPStrategy(ddp_comm_state=..., ddp_comm_wrapper=...)` belong to a hook, but there is none."
                " Pass `ddp_comm_hook=` too."
            )
        self._broadcasts_buffers = broadcast_buffers
        self.ddp_kwargs = dict(
            ddp_kwargs,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **_buffer_options(broadcast_buffers),
        )
        self._comm_hook = ddp_comm_wrapper(ddp_comm_hook) if ddp_comm_hook and ddp_comm_wrapper else ddp_comm_hook
        self._comm_state = ddp_comm_state

    @override
    def setup_module(self, module: Module) -> Module:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            _broadcast_state(module)
            return module
        device_ids = [self.root_device.index] if self.root_device.type == "cuda" else None
        ddp = DistributedDataParallel(_Entry(module), device_ids=device_ids, **self.ddp_kwargs)
        _keep_group_longer_than(ddp)
        rebuilds = self.world_size > 2 and not any(map(self.ddp_kwargs.get, _OWN_BUCKETS))  # a sum of two has no order
        if rebuilds and self.reduce_boolean_decision(can_settle(module)):
            settle(ddp)
        if self._comm_hook is not None:
            ddp.register_comm_hook(self._comm_state, self._comm_hook)
        return ddp

    @override
    def no_backward_sync(self, module: Module, enabled: bool = True) -> AbstractContextManager[Any]:
        # A module without trainable parameters is not wrapped, and one compiled before setup is compiled around DDP.
        ddp = getattr(module, "_orig_mod", module)
        if not enabled or not isinstance(ddp, DistributedDataParallel):
            return nullcontext()
        return ddp.no_sync()

    @override
    def syncs_backward(self, module: Module) -> bool:
        return isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync

    @property
    @override
    def replica_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    @override
    def has_synced_buffers(self, module: Module) -> bool:
        if not self._broadcasts_buffers or not isinstance(module, DistributedDataParallel):
            return False
        return module.require_forward_param_sync  # not after a forward without synchronisation, or without gradients

    @override
    def join_uneven_inputs(self, *modules: Module) -> AbstractContextManager[Any]:
        found = (getattr(module, "_orig_mod", module) for module in modules)
        synchronised: list[Joinable] = [module for module in found if isinstance(module, DistributedDataParallel)]
        if self.world_size == 1 or not synchronised:
            return nullcontext()
        return Join(synchronised)


def _buffer_options(broadcast_buffers: bool) -> dict[str, bool]:
    """The argument of `DistributedDataParallel` that says so; since torch 2.13 the former name warns, even if True."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return {} if broadcast_buffers else {name: False}


@torch.no_grad()
def _broadcast_state(module: Module) -> None:
    """Give all ranks rank 0's parameters and buffers: DDP refuses to wrap a module that has nothing to train."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor, src=0)


def _keep_group_longer_than(ddp: DistributedDataParallel) -> None:
    """Let Python's reference to the process group be the last one, also where the model outlives `teardown()`.

    The group ends by waiting for its threads, which may need the interpreter's lock to drop a tensor of a collective
    that is just done. What Python holds gives the lock back for that time; DDP's reducer, in C++, would keep it.
    """
    finalize(ddp.reducer, _drop, ddp.process_group).atexit = False


def _drop(group: Any) -> None:
    """The caller does."""
