# SPDX-License-Identifier: Apache-2.0
"""Data for many ranks: sharding a loader, epochs, resuming in the middle of one."""

from fabric.data.epochs import Moving
from fabric.data.loader import _FabricDataLoader
from fabric.data.place import Placed
from fabric.data.sharding import sampling_seed, shard_dataloader
from fabric.data.share import Share
from fabric.data.source import Ranks, Reading

__all__ = ["Moving", "Placed", "Ranks", "Reading", "Share", "_FabricDataLoader", "sampling_seed", "shard_dataloader"]
