# SPDX-License-Identifier: Apache-2.0
"""Whether debug mode is on, and its two numbers."""

import math
from collections.abc import Mapping

from fabric.plan.plan import Choice, DebugOptions

_ON, _OFF = ("1", "true"), ("", "0", "false")


def choose_debug(environ: Mapping[str, str]) -> Choice[DebugOptions | None]:
    """Debug mode by `FABRIC_DEBUG`, with `FABRIC_DEBUG_TIMEOUT` and `FABRIC_DEBUG_EVERY`.

    Raises:
        ValueError: If one of them has no meaning, also where debug mode is off.
    """
    written = environ.get("FABRIC_DEBUG", "").strip()
    if written.lower() not in (*_ON, *_OFF):
        raise ValueError(f"`FABRIC_DEBUG={written}` is not a switch. Write `FABRIC_DEBUG=1` or `FABRIC_DEBUG=0`.")
    options = DebugOptions(timeout=_read_timeout(environ), every=_read_every(environ))
    if written.lower() in _OFF:
        return Choice(None, "default", "off")
    label = f"timeout {options.timeout:g} s, replicas every {options.every} steps"
    return Choice(options, f"FABRIC_DEBUG={written}", label)


def _read_timeout(environ: Mapping[str, str]) -> float:
    written = environ.get("FABRIC_DEBUG_TIMEOUT", "").strip()
    try:
        timeout = float(written or DebugOptions.timeout)
    except ValueError:
        timeout = math.nan
    if not 0 < timeout < math.inf:
        raise ValueError(
            f"`FABRIC_DEBUG_TIMEOUT={written}` is not a number of seconds above 0, such as `FABRIC_DEBUG_TIMEOUT=300`."
        )
    return timeout


def _read_every(environ: Mapping[str, str]) -> int:
    written = environ.get("FABRIC_DEBUG_EVERY", "").strip() or str(DebugOptions.every)
    if not (written.isascii() and written.isdigit()) or int(written) < 1:
        raise ValueError(
            f"`FABRIC_DEBUG_EVERY={written}` is not a number of steps of at least 1, such as `FABRIC_DEBUG_EVERY=10`."
        )
    return int(written)
