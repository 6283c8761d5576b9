# SPDX-License-Identifier: Apache-2.0
"""Mixed precision by autocast, with a loss scaler for float16."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from fabric.plugins.precision.precision import Precision, cast_floats
from fabric.utilities.local_parts import any_rank, local_part

T = TypeVar("T")


class MixedPrecision(Precision):
    """Parameters in float32, forward under `torch.autocast`, half-precision outputs back in float32.

    One scaler serves several optimizers. `GradScaler.update()` must run once, after the last of their steps, so it
    is put off to the next `backward` (or `state_dict`).

    Args:
        precision: `16-mixed` or `bf16-mixed`.
        device: Device type that autocast acts on, `cpu`, `cuda` or `mps`.
        scaler: The loss scaler for `16-mixed`; by default `torch.amp.GradScaler(device)`.

    Raises:
        ValueError: If a scaler is given with `bf16-mixed`, which has float32's range and needs none.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: GradScaler | None = None,
    ) -> None:
        if precision == "bf16-mixed" and scaler is not None:
            raise ValueError(
                "`MixedPrecision('bf16-mixed', scaler=...)` takes no loss scaler: bfloat16 has the range of float32."
                " Leave `scaler` out, or use '16-mixed'."
            )
        self.precision = precision
        self.device: str = device
        self.dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}[precision]
        self._given_scaler = scaler
        self._stepped = False  # an optimizer stepped since the last update of the scale
        self._unscaled: dict[int, Optimizer] = {}  # the optimizers unscaled since then, by id

    @cached_property
    def scaler(self) -> GradScaler | None:
        """The loss scaler of `16-mixed`. Made at first use: its constructor asks CUDA, which spoils a later fork."""
        return (self._given_scaler or GradScaler(self.device)) if self.precision == "16-mixed" else None

    @property
    @override
    def skips_nonfinite_steps(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=self.dtype)

    @override
    def convert_output(self, data: T) -> T:
        return cast_floats(data, torch.float32, only=self.dtype)

    @override
    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        if self.scaler is not None:
            self._update_scale()
            tensor = self.scaler.scale(tensor)
        tensor.backward(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        if self.scaler is None:
            return optimizer.step(**kwargs)
        if kwargs.get("closure") is not None:
            raise RuntimeError(
                f"`{type(optimizer).__name__}.step(closure=...)` can't be combined with the loss scaler of"
                f" `precision={self.precision!r}`: a closure runs backward after the gradients were unscaled."
                " Call `fabric.backward(loss)` yourself and step without a closure, or use 'bf16-mixed'."
            )
        result = self.scaler.step(optimizer)
        self._stepped = True
        return result

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled[id(optimizer)] = optimizer

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.scaler is None:
            return {}
        self._update_scale()
        return self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            if self._stepped or self._unscaled:  # the scaler itself has to forget them, which only `update` does
                self._end_round()
            self.scaler.load_state_dict(dict(state_dict))

    def _update_scale(self) -> None:
        """End the round of steps before, if there was one."""
        if self._stepped or self._gave_up():
            self._end_round()

    def _end_round(self) -> None:
        if self.scaler is not None:
            self.scaler.update()
        self._stepped = False
        self._unscaled.clear()

    def _gave_up(self) -> bool:
        """Whether gradients were unscaled, and reset without a step."""
        return bool(self._unscaled) and not _have_gradients(list(self._unscaled.values()))


def _have_gradients(optimizers: list[Optimizer]) -> bool:
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    gradients = (local_part(parameter.grad) for parameter in parameters if parameter.grad is not None)
    return any_rank(any(bool(gradient.any()) for gradient in gradients), parameters)
