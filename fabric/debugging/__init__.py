# SPDX-License-Identifier: Apache-2.0
"""Debug mode, `FABRIC_DEBUG=1`: the ranks are compared at each collective, and NaN is traced to its module."""

from typing import TYPE_CHECKING

from fabric.debugging.checks import Checks
from fabric.utilities.lazy import importing_on_use

if TYPE_CHECKING:
    from fabric.debugging.debug_checks import DebugChecks

__all__ = ["Checks", "DebugChecks"]

__getattr__ = importing_on_use(__name__, {"DebugChecks": "fabric.debugging.debug_checks"})


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
