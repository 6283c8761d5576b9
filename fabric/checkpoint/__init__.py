# SPDX-License-Identifier: Apache-2.0
"""Saving and loading: from the user's objects to one file or a folder and back, with every rank of one mind."""

from typing import TYPE_CHECKING

from fabric.checkpoint.access import Attempts, StateAccess
from fabric.checkpoint.background import SaveHandle
from fabric.checkpoint.load import load, load_raw
from fabric.checkpoint.naming import own_names, with_names
from fabric.checkpoint.restore import load_module, load_optimizer
from fabric.checkpoint.save import save
from fabric.checkpoint.shards import copy_shard, is_sharded, placed_like, whole
from fabric.checkpoint.tree import is_stateful
from fabric.utilities.lazy import importing_on_use

if TYPE_CHECKING:
    from fabric.checkpoint.keeping import CheckpointManager

__all__ = [
    "Attempts",
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

_EXPORTS = {"CheckpointManager": "fabric.checkpoint.keeping"}  # resolved on first use

__getattr__ = importing_on_use(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
