# SPDX-License-Identifier: Apache-2.0
"""What runs, and why: the pure resolver between `Fabric(...)` and everything that has side effects."""

from fabric.plan.arguments import Arguments
from fabric.plan.plan import Choice, Plan
from fabric.plan.resolve import resolve

__all__ = ["Arguments", "Choice", "Plan", "resolve"]
