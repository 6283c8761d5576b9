# SPDX-License-Identifier: Apache-2.0
"""Half precision throughout."""

from typing import Literal, TypeVar

import torch
from typing_extensions import override

from fabric.plugins.precision.precision import cast_floats
from fabric.plugins.precision.true import TruePrecision

T = TypeVar("T")


class HalfPrecision(TruePrecision):
    """Parameters, inputs and arithmetic in float16 or bfloat16; outputs come back as float32.

    Args:
        precision: `16-true` or `bf16-true`.
    """

    def __init__(self, precision: Literal["16-true", "bf16-true"] = "16-true") -> None:
        self.precision = precision
        self.dtype = {"16-true": torch.float16, "bf16-true": torch.bfloat16}[precision]

    @override
    def convert_output(self, data: T) -> T:
        return cast_floats(data, torch.float32, only=self.dtype)
