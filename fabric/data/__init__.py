# SPDX-License-Identifier: Apache-2.0
"""Data for many ranks: sharding a loader, epochs, resuming in the middle of one."""

from typing import TYPE_CHECKING

from fabric.utilities.lazy import importing_on_use

if TYPE_CHECKING:
    from fabric.data.epochs import Moving
    from fabric.data.loader import _FabricDataLoader
    from fabric.data.place import Placed
    from fabric.data.sharding import sampling_seed, shard_dataloader
    from fabric.data.share import Share
    from fabric.data.source import Ranks, Reading

__all__ = ["Moving", "Placed", "Ranks", "Reading", "Share", "_FabricDataLoader", "sampling_seed", "shard_dataloader"]

_EXPORTS = {  # resolved on first use: a program without a loader needs none of it
    "Moving": "fabric.data.epochs",
    "Placed": "fabric.data.place",
    "Ranks": "fabric.data.source",
    "Reading": "fabric.data.source",
    "Share": "fabric.data.share",
    "_FabricDataLoader": "fabric.data.loader",
    "sampling_seed": "fabric.data.sharding",
    "shard_dataloader": "fabric.data.sharding",
}

__getattr__ = importing_on_use(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
