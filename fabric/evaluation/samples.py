# SPDX-License-Identifier: Apache-2.0
"""What stands for the samples of a batch, in any nesting of containers."""

import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fabric.utilities.apply_func import apply_to_items

_NUMBERS = "biufc"  # the kinds of NumPy arrays that are tensors too


def values_by_sample(data: Any, path: str = "data") -> Iterator[tuple[str, Any]]:
    """Each value that has an entry for each sample, with how one writes it.

    These are tensors and NumPy arrays of numbers, whose first dimension is the batch, and lists and tuples in which
    there is no tensor or array, whose items are the samples'. Other lists and tuples, dictionaries, named tuples and
    dataclasses are containers of them. `None` is handed through.

    Raises:
        ValueError: If there is anything else, or a tensor without dimensions.

    Example:
        >>> [path for path, _ in values_by_sample({"names": ["a", "b"], "pair": (np.ones(2), np.ones(2))})]
        ["data['names']", "data['pair'][0]", "data['pair'][1]"]
    """
    if data is None:
        return
    if _is_by_sample(data):
        if isinstance(data, Tensor | np.ndarray) and data.ndim == 0:
            raise ValueError(
                f"`fabric.gather_for_metrics(data, loader)` gathers one value for each sample, and `{path}` is a single"
                " number. Use `fabric.weighted_mean(sum, count)` for a loss, or `fabric.all_gather(...)`."
            )
        yield path, data
        return
    items = _items(data)
    if items is None:
        raise ValueError(
            f"`fabric.gather_for_metrics(data, loader)` gathers tensors, arrays of numbers, and lists with one item for"
            f" each sample, and `{path}` is of type `{type(data).__name__}`. Leave it out, or make it one of these."
        )
    for step, value in items:
        yield from values_by_sample(value, path + step)


def map_by_sample(data: Any, function: Callable[[Any], Any]) -> Any:
    """The same nesting with each value of `values_by_sample`, in that order, replaced."""
    if data is None:
        return None
    if _is_by_sample(data):
        return function(data)
    return apply_to_items(data, lambda value: map_by_sample(value, function))


def _is_by_sample(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    if isinstance(data, np.ndarray):
        return data.dtype.kind in _NUMBERS
    return _is_list(data) and not _holds_tensors(data)


def _is_list(data: Any) -> bool:
    return isinstance(data, list | tuple) and not hasattr(data, "_fields")  # a named tuple is a container


def _holds_tensors(data: Any) -> bool:
    if isinstance(data, Tensor | np.ndarray):
        return True
    items = _items(data)
    return items is not None and any(_holds_tensors(value) for _, value in items)


def _items(data: Any) -> Iterable[tuple[str, Any]] | None:
    """What a container holds, with how one writes it; None for anything else."""
    if isinstance(data, Mapping):
        return [(f"[{key!r}]", value) for key, value in data.items()]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return [(f".{name}", value) for name, value in zip(data._fields, data, strict=True)]
    if isinstance(data, list | tuple | UserList | deque):
        return [(f"[{index}]", value) for index, value in enumerate(data)]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]
        return [(f".{name}", getattr(data, name)) for name in names]
    return None
