# SPDX-License-Identifier: Apache-2.0
"""What `setup` and `setup_dataloaders` return: the user's objects, going through the strategy."""

from typing import TYPE_CHECKING

from fabric.utilities.lazy import importing_on_use
from fabric.wrappers.module import _FabricModule
from fabric.wrappers.optimizer import _FabricOptimizer
from fabric.wrappers.set_up import SetUpObjects
from fabric.wrappers.unwrap import _copy_plain_values, _unwrap_compiled, _unwrap_objects, is_wrapped

if TYPE_CHECKING:
    from fabric.data import _FabricDataLoader

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

__getattr__ = importing_on_use(__name__, {"_FabricDataLoader": "fabric.data.loader"})
