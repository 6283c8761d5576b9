# SPDX-License-Identifier: Apache-2.0
"""Mixed precision of sharded parameters."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from fabric.plugins.precision.amp import MixedPrecision
from fabric.utilities.local_parts import local_gradients

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class FSDPPrecision(MixedPrecision):
    """Master weights and their gradients in float32; parameters are gathered, and computed with, in half precision.

    Forward runs under autocast too, so that the operations which need float32 get it as in any other strategy. The
    loss scaler of `16-mixed` skips a step on all ranks where one of them has an infinite gradient.

    Args:
        precision: `16-mixed` or `bf16-mixed`.
        device: Device type that autocast acts on, `cpu` or `cuda`.
        scaler: The loss scaler for `16-mixed`; by default one that agrees over all ranks. PyTorch's own agrees over
            ranks too, where all parameters are sharded.
    """

    @property
    def mixed_precision_policy(self) -> MixedPrecisionPolicy:
        """What `fully_shard` is told: gather in half precision, reduce gradients in float32."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)

    @cached_property
    def scaler(self) -> GradScaler | None:
        """The loss scaler of `16-mixed`."""
        if self.precision != "16-mixed":
            return None
        return self._given_scaler or _AgreeingGradScaler(self.device)


class _AgreeingGradScaler(GradScaler):
    """Unscales each rank's parts of the gradients, plain and sharded ones, and skips a step on all ranks or on none."""

    # PyTorch's `ShardedGradScaler` overrides the same method; there is no public place between unscaling and stepping.
    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        local: Any = SimpleNamespace(param_groups=[{"params": local_gradients(parameters)}])
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return found
        here = [found_inf.new_tensor(float(bool(found))), *(each.to(found_inf.device) for each in found.values())]
        flags = torch.stack([here[0], torch.stack(here[1:] or [found_inf]).amax()])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if not found and not bool(flags[0]):
            return found  # no rank has gradients
        return {device: flags[1].to(device) for device in found or (found_inf.device,)}
