# SPDX-License-Identifier: Apache-2.0
"""Half precision throughout: parameters, gradients and arithmetic."""

from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import torch
from torch.nn import Module
from typing_extensions import override

from fabric.plugins.precision.precision import Precision, cast_floats, default_dtype_context

T = TypeVar("T")


class HalfPrecision(Precision):
    """Parameters, inputs and arithmetic in float16 or bfloat16; outputs come back as float32.

    Args:
        precision: `16-true` or `bf16-true`.
    """

    def __init__(self, precision: Literal["16-true", "bf16-true"] = "16-true") -> None:
        self.precision = precision
        self.dtype = {"16-true": torch.float16, "bf16-true": torch.bfloat16}[precision]

    @override
    def convert_module(self, module: Module) -> Module:
        return module.to(self.dtype)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype_context(self.dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype_context(self.dtype)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return default_dtype_context(self.dtype)

    @override
    def convert_input(self, data: T) -> T:
        return cast_floats(data, self.dtype)

    @override
    def convert_output(self, data: T) -> T:
        return cast_floats(data, torch.float32, only=self.dtype)
