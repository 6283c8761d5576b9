# SPDX-License-Identifier: Apache-2.0
"""Going through nested batches: moving them to a device, taking numbers out of them."""

import copy
import dataclasses
import inspect
import operator
from collections import UserList, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from fabric.utilities.types import DeviceLike

# What most batches hold besides tensors, and what never needs a look inside.
_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})


def move_data_to_device(batch: Any, device: DeviceLike) -> Any:
    """Move the tensors of a batch to a device.

    Goes through containers as `apply_to_tensors` does, and calls `.to(device)` on anything that has it. What is there
    already is not copied. Copies from pinned memory to CUDA do not block, also those of an object whose `.to` takes
    `non_blocking=`.

    Args:
        batch: A tensor or any nesting of containers.
        device: Where to.

    Returns:
        The batch on the device.

    Raises:
        ValueError: If a container holds itself.

    Example:
        >>> move_data_to_device({"x": torch.zeros(2), "name": "a"}, "meta")["x"].device
        device(type='meta')
    """
    target = torch.device(device)

    # From the CPU to CUDA it is always safe: what is not pinned is read before the call returns.
    to_cuda = target.type == "cuda"

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(target, non_blocking=to_cuda and tensor.device.type == "cpu")

    def move_other(data: Any) -> Any:
        if not callable(to := getattr(data, "to", None)):
            return NotImplemented
        moved = to(target, non_blocking=True) if to_cuda and _takes_non_blocking(to) else to(target)
        return data if moved is None else moved  # some move in place and forget to return themselves

    try:
        return apply_to_tensors(batch, move, move_other)
    except RecursionError:
        raise ValueError(
            "This batch can't be moved: one of its containers holds itself, or they are nested too deep."
            " Take the reference to itself out of what the data set or `collate_fn` returns."
        ) from None


def _takes_non_blocking(to: Callable[..., Any]) -> bool:
    """Whether a `.to` has such an argument, or hands all that it gets on to the tensors inside."""
    try:
        parameters = inspect.signature(to).parameters
    except (TypeError, ValueError):  # it is not written in Python
        return False
    kinds = {parameter.kind for parameter in parameters.values()}
    return "non_blocking" in parameters or {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def _look_inside(data: Any) -> Any:
    return NotImplemented


def apply_to_tensors(
    data: Any,
    function: Callable[[Tensor], Any],
    other: Callable[[Any], Any] = _look_inside,
    number: Callable[[int | float], Any] | None = None,
) -> Any:
    """Apply a function to each tensor in nested containers.

    Goes through dictionaries and other mappings, lists, tuples, named tuples, deques and dataclasses, nested as they
    come; everything else is handed through. A container in which nothing changes comes back as the same object;
    otherwise a new one of the same type is made.

    Args:
        data: A tensor or any nesting of containers.
        function: From a tensor to what takes its place.
        other: Called first with what is no tensor, list, tuple or dict itself; `NotImplemented` means to look inside.
        number: From an `int`, `float` or `bool` to what takes its place; None hands them through.
    """
    kind = type(data)
    if number is not None and isinstance(data, int | float):
        return number(data)
    if kind in _LEAVES:
        return data
    if isinstance(data, Tensor):
        return function(data)
    if kind is dict:
        new = {key: apply_to_tensors(value, function, other, number) for key, value in data.items()}
        return data if _is_same(data.values(), new.values()) else new
    if kind is list or kind is tuple:
        items = [apply_to_tensors(value, function, other, number) for value in data]
        return data if _is_same(data, items) else kind(items)
    if isinstance(data, type):
        return data
    result = other(data)
    if result is not NotImplemented:
        return result
    return apply_to_items(data, lambda value: apply_to_tensors(value, function, other, number))


def _is_same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(map(operator.is_, old, new))


def apply_to_items(data: Any, apply: Callable[[Any], Any]) -> Any:
    """A container of the same type whose direct items went through `apply`; the same object where none changes."""
    for container, rebuild in _CONTAINERS:
        if isinstance(data, container):
            return rebuild(data, apply)
    return _rebuild_dataclass(data, apply) if dataclasses.is_dataclass(data) else data


def _rebuild_mapping(data: Mapping[Any, Any], apply: Callable[[Any], Any]) -> Any:
    new = {key: apply(value) for key, value in data.items()}
    if _is_same(data.values(), new.values()):
        return data
    if not isinstance(data, MutableMapping):
        return type(data)(new)  # type: ignore[call-arg]
    result = copy.copy(data)  # keeps what the type holds beside its items, such as the factory of a `defaultdict`
    for key, value in new.items():
        result[key] = value
    return result


def _rebuild_tuple(data: tuple[Any, ...], apply: Callable[[Any], Any]) -> Any:
    new = [apply(value) for value in data]
    if _is_same(data, new):
        return data
    make = getattr(type(data), "_make", type(data))  # a named tuple takes its fields one by one
    return make(new)


def _rebuild_sequence(data: Any, apply: Callable[[Any], Any]) -> Any:
    new = [apply(value) for value in data]
    if _is_same(data, new):
        return data
    result = copy.copy(data)
    for index, value in enumerate(new):
        result[index] = value
    return result


def _rebuild_dataclass(data: Any, apply: Callable[[Any], Any]) -> Any:
    values = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if hasattr(data, f.name)}
    new = {name: apply(value) for name, value in values.items()}
    if _is_same(values.values(), new.values()):
        return data
    result = copy.copy(data)  # not `dataclasses.replace`, which would run the user's `__init__` again
    for name, value in new.items():
        object.__setattr__(result, name, value)  # a frozen dataclass too
    return result


_CONTAINERS: tuple[tuple[Any, Callable[[Any, Callable[[Any], Any]], Any]], ...] = (
    (Mapping, _rebuild_mapping),
    (tuple, _rebuild_tuple),
    ((list, UserList, deque), _rebuild_sequence),
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

    return apply_to_tensors(data, to_scalar)
