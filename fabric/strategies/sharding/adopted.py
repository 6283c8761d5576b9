# SPDX-License-Identifier: Apache-2.0
"""Models to which the user has applied `fully_shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from fabric.strategies.sharding.apply import _reshard_without_gradients, _ShardedEntry, shard_unit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def adopt_module(module: Module, mesh: DeviceMesh) -> Module:
    """What a forward calls for a model that is sharded already; what is in none of its units is sharded with the entry.

    Args:
        module: The user's model.
        mesh: Over which the rest is sharded.
    """
    entry = _AdoptedEntry(module)
    shard_unit(entry, mesh=mesh)
    entry.register_forward_hook(_reshard_without_gradients)
    return entry


class _AdoptedEntry(_ShardedEntry):
    """Around a root that may be a unit itself, whose other methods must gather its parameters too."""

    def __init__(self, inner: Module) -> None:
        super().__init__(inner)
        self._gathering = {"forward"}  # the methods around which the root's own parameters are gathered

    @override
    def forward(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

        if method not in self._gathering and isinstance(self.inner, FSDPModule):
            register_fsdp_forward_method(self.inner, method)
        self._gathering.add(method)
        return super().forward(method, *args, **kwargs)
