# SPDX-License-Identifier: Apache-2.0
"""Creating modules without spending time on their random initial values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _SkipInit(TorchFunctionMode):
    """Turns the functions of `torch.nn.init` that fill a tensor into no-ops."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def skip_init_context(device: torch.device) -> Iterator[None]:
    """Modules created inside have their parameters on `device`, with values that are not initialised."""
    with device, _SkipInit():
        yield
