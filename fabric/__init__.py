# SPDX-License-Identifier: Apache-2.0
"""Fabric scales a plain PyTorch loop without hiding it: `import fabric as L; fabric = L.Fabric(devices=2)`."""

from typing import TYPE_CHECKING

from fabric.utilities.lazy import importing_on_use as _importing_on_use

if TYPE_CHECKING:
    from fabric.fabric import Fabric
    from fabric.utilities.seed import seed_everything
    from fabric.wrappers import is_wrapped

__version__ = "0.1.0"
__all__ = ["Fabric", "__version__", "is_wrapped", "seed_everything"]

# Resolved on first use, so that the `fabric` command can start worker processes without importing torch itself.
_EXPORTS = {"Fabric": "fabric.fabric", "seed_everything": "fabric.utilities.seed", "is_wrapped": "fabric.wrappers"}


__getattr__ = _importing_on_use(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
