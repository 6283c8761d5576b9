# SPDX-License-Identifier: Apache-2.0
"""What the tests of debug mode share: ranks in debug mode, and errors with lines that do not move."""

import inspect
import os
import re
from collections.abc import Callable
from typing import Any

from fabric import Fabric
from tests.ranks import RankContext


def debugged(context: RankContext, *, timeout: float = 30, every: int = 1, **kwargs: Any) -> Fabric:
    """A launched Fabric in debug mode; the variables are read while it is made, and are gone afterwards."""
    variables = {"FABRIC_DEBUG": "1", "FABRIC_DEBUG_TIMEOUT": str(timeout), "FABRIC_DEBUG_EVERY": str(every)}
    os.environ.update(variables)
    try:
        return context.fabric(**kwargs)
    finally:
        for name in variables:
            del os.environ[name]


def error_of(case: Callable[..., Any], fabric: Fabric) -> str:
    """The error that `case(fabric, rank)` raises, or `fine`; lines of the case are shown as `+1`, `+2`, ..."""
    try:
        case(fabric, fabric.global_rank)
    except (RuntimeError, ValueError, FloatingPointError) as error:
        first = case.__code__.co_firstlineno
        place = re.escape(inspect.getfile(case)) + r":(\d+)"
        return f"{type(error).__name__}: " + re.sub(place, lambda m: f"+{int(m[1]) - first}", str(error))
    return "fine"
