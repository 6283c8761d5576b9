# SPDX-License-Identifier: Apache-2.0
"""The base of every precision: full precision, where each hook does nothing."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fabric.utilities.apply_func import apply_to_tensors

T = TypeVar("T")

_FORWARD_HOOKS = ("convert_input", "forward_context", "convert_output")


class Precision:
    """Full precision. Every hook is a no-op, so a subclass overrides only what it changes.

    Hooks run on every rank. Those of one step run in this order: `convert_input`, `forward_context`,
    `convert_output`, `backward`, `unscale_gradients` (only when gradients are clipped), `optimizer_step`.
    """

    precision: str = "32-true"
    device: str | None = None  # the one type of device that it works on; None for all

    @property
    def changes_forward(self) -> bool:
        """Whether a subclass overrides a hook around forward; asked once, at `setup`."""
        return any(getattr(type(self), hook) is not getattr(Precision, hook) for hook in _FORWARD_HOOKS)

    @property
    def skips_nonfinite_steps(self) -> bool:
        """Whether `optimizer_step` itself skips a step with infinite or NaN gradients, as a loss scaler does."""
        return False

    def convert_module(self, module: Module) -> Module:
        """Change the dtype or the layers of a module, in place where possible; runs once, at `setup`."""
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """The dtype of tensors created under `fabric.init_tensor()`."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """The dtype of modules created under `fabric.init_module()`."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Surrounds each forward and each marked method."""
        return nullcontext()

    def convert_input(self, data: T) -> T:
        """Convert what forward is given: `(args, kwargs)`."""
        return data

    def convert_output(self, data: T) -> T:
        """Convert what forward returns."""
        return data

    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run `tensor.backward(*args, **kwargs)`, scaled where the precision needs it."""
        tensor.backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Run `optimizer.step(**kwargs)`; returns what it returns."""
        return optimizer.step(**kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the loss scale, once per step."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the loss scaler's state, or nothing."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@contextmanager
def default_dtype_context(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default for new floating-point tensors, and put the former one back."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def cast_floats(data: T, dtype: torch.dtype, only: torch.dtype | None = None) -> T:
    """Cast the floating-point tensors in `data`, a tensor or any nesting of containers, to `dtype`.

    Args:
        data: What to convert; everything that is not a floating-point tensor stays as it is.
        dtype: The dtype to cast to.
        only: Cast only the tensors that have this dtype.
    """

    def cast(tensor: Tensor) -> Tensor:
        selected = tensor.is_floating_point() if only is None else tensor.dtype is only
        return tensor.to(dtype) if selected else tensor

    if isinstance(data, Tensor):
        return cast(data)  # type: ignore[return-value]
    return apply_to_tensors(data, cast)  # type: ignore[no-any-return]
