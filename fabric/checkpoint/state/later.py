# SPDX-License-Identifier: Apache-2.0
"""Tensors whose values are brought when they are written, one at a time, so that none has to be in memory before."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fabric.checkpoint.state.shards import is_sharded
from fabric.utilities.parameter_names import rebuilt

_CHUNK = 1 << 24


class Later:
    """Stands for a tensor in a content.

    Args:
        shape: Its (global) shape.
        dtype: Its dtype.
        read: Brings its values, on any device.
        key: Tensors with equal keys are one tensor under several names; None where it is like no other.
        is_fresh: Whether what `read` brings is nobody else's, so that its memory can be given back after use.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        read: Callable[[], Tensor],
        key: Hashable | None = None,
        is_fresh: bool = True,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.read = read
        self.is_fresh = is_fresh
        self.key = id(self) if key is None else key

    def stand_in(self) -> Tensor:
        """A tensor without memory that shows what this one is."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[memoryview]:
        """Its values as bytes, in rows, little-endian as in all of these files."""
        value = self.read().detach()
        if value.shape != self.shape or value.dtype != self.dtype:
            raise AssertionError(f"{value.dtype} {tuple(value.shape)} came for {self.dtype} {tuple(self.shape)}")
        value = value.cpu().resolve_conj().resolve_neg().contiguous()
        if not value.numel():
            return
        data = as_bytes(value).numpy().data
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor. One with a single number may have any strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def later(tensor: Tensor) -> Later:
    """For a tensor that is there already. A strided one only: others have no rows."""
    place = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
    return Later(tensor.shape, tensor.dtype, lambda: tensor, place if tensor.numel() else None, is_fresh=False)


def is_rows(value: Any) -> bool:
    """Whether a value is a tensor whose values can be written as rows of numbers."""
    if isinstance(value, Later):
        return True
    return isinstance(value, Tensor) and (is_sharded(value) or _is_plain(value))


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_quantized and tensor.device.type != "meta"


def replaced(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same dictionaries, lists and tuples with `function(tensor)` in the place of each tensor, in their order."""
    if isinstance(value, Tensor | Later):
        return function(value)
    if isinstance(value, Mapping):
        entries = {key: replaced(item, function) for key, item in value.items()}
        if all(new is old for new, old in zip(entries.values(), value.values(), strict=True)):
            return value
        return rebuilt(value, entries) if isinstance(value, OrderedDict) else entries
    if type(value) in (list, tuple):
        return type(value)(replaced(item, function) for item in value)
    return value
