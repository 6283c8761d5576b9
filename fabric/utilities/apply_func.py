# SPDX-License-Identifier: Apache-2.0
"""Going through nested batches: moving them to a device, taking numbers out of them."""

import copy
import dataclasses
import operator
from collections import UserList, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fabric.utilities.types import DeviceLike

# What most batches hold besides tensors, and what never needs a look inside.
_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})


def move_data_to_device(batch: Any, device: DeviceLike) -> Any:
    """Move the tensors of a batch to a device.

    Goes through dictionaries and other mappings, lists, tuples, named tuples, deques and dataclasses, nested as they
    come, and calls `.to(device)` on anything that has it. Everything else is handed through. What is there already is
    not copied: a container in which nothing moves comes back as the same object; otherwise a new one of the same type
    is made. Copies from pinned memory to CUDA do not block.

    Args:
        batch: A tensor or any nesting of containers.
        device: Where to.

    Returns:
        The batch on the device.

    Example:
        >>> move_data_to_device({"x": torch.zeros(2), "name": "a"}, "meta")["x"].device
        device(type='meta')
    """
    return _move(batch, device if isinstance(device, torch.device) else torch.device(device))


def _move(data: Any, device: torch.device) -> Any:
    kind = type(data)
    if kind in _LEAVES:
        return data
    if isinstance(data, Tensor):
        here = data.device
        if here == device:  # a quarter of the time that `.to` takes to find that out
            return data
        return data.to(device, non_blocking=device.type == "cuda" and here.type == "cpu" and data.is_pinned())
    if kind is dict:
        return _move_dict(data, device)
    if kind is list or kind is tuple:
        moved = [_move(value, device) for value in data]
        return data if _is_same(data, moved) else kind(moved)
    return _move_other(data, device)


def _is_same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(map(operator.is_, old, new))


def _move_dict(data: dict[Any, Any], device: torch.device) -> dict[Any, Any]:
    moved = {key: _move(value, device) for key, value in data.items()}
    return data if _is_same(data.values(), moved.values()) else moved


def _move_other(data: Any, device: torch.device) -> Any:
    """Objects that move themselves, and the rarer containers."""
    if isinstance(data, type):
        return data
    if callable(to := getattr(data, "to", None)):
        moved = to(device)
        return data if moved is None else moved  # some move in place and forget to return themselves
    for container, move in _CONTAINERS:
        if isinstance(data, container):
            return move(data, device)
    if dataclasses.is_dataclass(data):
        return _move_dataclass(data, device)
    return data


def _move_mapping(data: Mapping[Any, Any], device: torch.device) -> Any:
    moved = {key: _move(value, device) for key, value in data.items()}
    if _is_same(data.values(), moved.values()):
        return data
    if not isinstance(data, MutableMapping):
        return type(data)(moved)  # type: ignore[call-arg]
    result = copy.copy(data)  # keeps what the type holds beside its items, such as the factory of a `defaultdict`
    for key, value in moved.items():
        result[key] = value
    return result


def _move_tuple(data: tuple[Any, ...], device: torch.device) -> Any:
    moved = [_move(value, device) for value in data]
    if _is_same(data, moved):
        return data
    make = getattr(type(data), "_make", type(data))  # a named tuple takes its fields one by one
    return make(moved)


def _move_sequence(data: Any, device: torch.device) -> Any:
    moved = [_move(value, device) for value in data]
    if _is_same(data, moved):
        return data
    result = copy.copy(data)
    for index, value in enumerate(moved):
        result[index] = value
    return result


def _move_dataclass(data: Any, device: torch.device) -> Any:
    values = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if hasattr(data, f.name)}
    moved = {name: _move(value, device) for name, value in values.items()}
    if _is_same(values.values(), moved.values()):
        return data
    result = copy.copy(data)  # not `dataclasses.replace`, which would run the user's `__init__` again
    for name, value in moved.items():
        object.__setattr__(result, name, value)  # a frozen dataclass too
    return result


_CONTAINERS: tuple[tuple[Any, Callable[[Any, torch.device], Any]], ...] = (
    (Mapping, _move_mapping),
    (tuple, _move_tuple),
    ((list, UserList, deque), _move_sequence),
)


def convert_tensors_to_scalars(data: Any) -> Any:
    """Replace each tensor in nested containers by the Python number that it holds.

    Raises:
        ValueError: If a tensor has more or less than one element.

    Example:
        >>> convert_tensors_to_scalars({"loss": torch.tensor(0.5), "step": 3})
        {'loss': 0.5, 'step': 3}
    """

    def to_scalar(value: Tensor) -> int | float | complex | bool:
        if value.numel() != 1:
            raise ValueError(
                f"A tensor of shape {tuple(value.shape)} is no single number."
                " Reduce it first, for example with `.mean()`."
            )
        return value.item()

    return apply_to_collection(data, Tensor, to_scalar)
