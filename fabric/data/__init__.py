# SPDX-License-Identifier: Apache-2.0
"""Data for many ranks: sharding a loader, epochs, resuming in the middle of one."""

from fabric.data.loader import _FabricDataLoader
from fabric.data.sharding import sampling_seed, shard_dataloader

__all__ = ["_FabricDataLoader", "sampling_seed", "shard_dataloader"]
