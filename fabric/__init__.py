# SPDX-License-Identifier: Apache-2.0
"""Fabric scales a plain PyTorch loop without hiding it: `import fabric as L; fabric = L.Fabric(devices=2)`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric.fabric import Fabric
    from fabric.utilities.seed import seed_everything
    from fabric.wrappers import is_wrapped

__version__ = "0.1.0"
__all__ = ["Fabric", "__version__", "is_wrapped", "seed_everything"]

# Resolved on first use, so that the `fabric` command can start worker processes without importing torch itself.
_EXPORTS = {"Fabric": "fabric.fabric", "seed_everything": "fabric.utilities.seed", "is_wrapped": "fabric.wrappers"}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module `fabric` has no attribute `{name}`")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
