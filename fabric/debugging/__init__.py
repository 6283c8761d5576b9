# SPDX-License-Identifier: Apache-2.0
"""Debug mode, `FABRIC_DEBUG=1`: the ranks are compared at each collective, and NaN is traced to its module."""

from fabric.debugging.checks import Checks
from fabric.debugging.debug_checks import DebugChecks

__all__ = ["Checks", "DebugChecks"]
