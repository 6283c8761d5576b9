# SPDX-License-Identifier: Apache-2.0
"""Saving and loading: from the user's objects to one file or a folder and back, with every rank of one mind.

What is named here is imported when it is first used: most of it is not needed before the first checkpoint.
"""

from typing import TYPE_CHECKING

from fabric.utilities.lazy import importing_on_use

if TYPE_CHECKING:
    from fabric.checkpoint.access import Attempts, StateAccess
    from fabric.checkpoint.background import BackgroundSaves, SaveHandle
    from fabric.checkpoint.keeping import CheckpointManager
    from fabric.checkpoint.loading import load, load_raw
    from fabric.checkpoint.restoring.restore import load_module, load_optimizer
    from fabric.checkpoint.saving import save
    from fabric.checkpoint.state.naming import own_names, with_names
    from fabric.checkpoint.state.shards import copy_shard, is_sharded, placed_like, whole
    from fabric.checkpoint.state.tree import is_stateful

__all__ = [
    "Attempts",
    "BackgroundSaves",
    "CheckpointManager",
    "SaveHandle",
    "StateAccess",
    "copy_shard",
    "is_sharded",
    "is_stateful",
    "load",
    "load_module",
    "load_optimizer",
    "load_raw",
    "own_names",
    "placed_like",
    "save",
    "whole",
    "with_names",
]

_EXPORTS = {
    "Attempts": "fabric.checkpoint.access",
    "BackgroundSaves": "fabric.checkpoint.background",
    "CheckpointManager": "fabric.checkpoint.keeping",
    "SaveHandle": "fabric.checkpoint.background",
    "StateAccess": "fabric.checkpoint.access",
    "copy_shard": "fabric.checkpoint.state.shards",
    "is_sharded": "fabric.checkpoint.state.shards",
    "is_stateful": "fabric.checkpoint.state.tree",
    "load": "fabric.checkpoint.loading",
    "load_module": "fabric.checkpoint.restoring.restore",
    "load_optimizer": "fabric.checkpoint.restoring.restore",
    "load_raw": "fabric.checkpoint.loading",
    "own_names": "fabric.checkpoint.state.naming",
    "placed_like": "fabric.checkpoint.state.shards",
    "save": "fabric.checkpoint.saving",
    "whole": "fabric.checkpoint.state.shards",
    "with_names": "fabric.checkpoint.state.naming",
}

__getattr__ = importing_on_use(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
