# SPDX-License-Identifier: Apache-2.0
"""What `setup` and `setup_dataloaders` return: the user's objects, going through the strategy."""

from fabric.data import _FabricDataLoader
from fabric.wrappers.module import _FabricModule
from fabric.wrappers.optimizer import _FabricOptimizer
from fabric.wrappers.set_up import SetUpObjects
from fabric.wrappers.unwrap import _copy_plain_values, _unwrap_compiled, _unwrap_objects, is_wrapped

__all__ = [
    "SetUpObjects",
    "_FabricDataLoader",
    "_FabricModule",
    "_FabricOptimizer",
    "_copy_plain_values",
    "_unwrap_compiled",
    "_unwrap_objects",
    "is_wrapped",
]
