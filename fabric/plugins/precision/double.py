# SPDX-License-Identifier: Apache-2.0
"""Double precision throughout."""

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.nn import Module
from typing_extensions import override

from fabric.plugins.precision.precision import Precision, cast_floats, default_dtype_context

T = TypeVar("T")


class DoublePrecision(Precision):
    """Parameters, inputs, arithmetic and outputs in float64."""

    precision = "64-true"

    @override
    def convert_module(self, module: Module) -> Module:
        return module.double()

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype_context(torch.float64)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype_context(torch.float64)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return default_dtype_context(torch.float64)

    @override
    def convert_input(self, data: T) -> T:
        return cast_floats(data, torch.float64)
