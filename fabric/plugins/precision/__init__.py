# SPDX-License-Identifier: Apache-2.0
"""Precisions: where dtypes live."""

from collections.abc import Callable

from fabric.plugins.precision.amp import MixedPrecision
from fabric.plugins.precision.double import DoublePrecision
from fabric.plugins.precision.fsdp import FSDPPrecision
from fabric.plugins.precision.half import HalfPrecision
from fabric.plugins.precision.precision import Precision
from fabric.utilities.spelling import suggest

__all__ = [
    "PRECISIONS",
    "PRECISION_ALIASES",
    "DoublePrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "canonical_precision",
    "create_precision",
]

PRECISIONS: dict[str, Callable[[str], Precision]] = {
    "32-true": lambda device_type: Precision(),
    "64-true": lambda device_type: DoublePrecision(),
    "16-true": lambda device_type: HalfPrecision("16-true"),
    "bf16-true": lambda device_type: HalfPrecision("bf16-true"),
    "16-mixed": lambda device_type: MixedPrecision("16-mixed", device_type),
    "bf16-mixed": lambda device_type: MixedPrecision("bf16-mixed", device_type),
}
PRECISION_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_OTHER_WORDS = {
    **dict.fromkeys(("fp16", "float16", "half"), "16-mixed"),
    **dict.fromkeys(("bfloat16",), "bf16-mixed"),
    **dict.fromkeys(("fp32", "float32", "float", "full"), "32-true"),
    **dict.fromkeys(("fp64", "float64", "double"), "64-true"),
}


def canonical_precision(precision: str | int) -> str:
    """The full name of a precision given by name or alias, such as `bf16` for `bf16-mixed`.

    Raises:
        ValueError: If there is no such precision; the message lists the choices and the nearest spelling.
    """
    name = str(precision)
    name = PRECISION_ALIASES.get(name, name)
    if name in PRECISIONS:
        return name
    meant = _OTHER_WORDS.get(name.lower(), name)
    raise ValueError(
        f"`precision={precision!r}` is not a known precision. {suggest(meant, [*PRECISIONS, *PRECISION_ALIASES])}"
    )


def create_precision(name: str, device_type: str) -> Precision:
    """Make the precision of this (full) name for tensors on `device_type`.

    Raises:
        ValueError: If that kind of device can't compute in it.
    """
    if name == "64-true" and device_type == "mps":
        raise ValueError(
            "`precision='64-true'` can't run on MPS, which has no float64."
            " Choose '32-true', or `Fabric(accelerator='cpu')`."
        )
    return PRECISIONS[name](device_type)
