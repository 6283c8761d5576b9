# SPDX-License-Identifier: Apache-2.0
"""What the precisions share that keep a model in one dtype."""

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.nn import Module
from typing_extensions import override

from fabric.plugins.precision.precision import Precision, cast_floats, default_dtype_context

T = TypeVar("T")


class TruePrecision(Precision):
    """Parameters, inputs and arithmetic in one dtype, `dtype`, which is also the default inside of forward."""

    dtype: torch.dtype

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
