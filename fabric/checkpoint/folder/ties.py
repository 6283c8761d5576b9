# SPDX-License-Identifier: Apache-2.0
"""Tensors with several names in a folder: stored once, and found by each reader under all of their names."""

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from fabric.checkpoint.state.flatten import Path
from fabric.checkpoint.state.later import Later, is_rows, later
from fabric.checkpoint.state.shards import is_sharded

_TIE = "fabric.tie "  # before a second name, among what the ranks tell rank 0; not in what is written


def second_names(flat: Mapping[Path, Any]) -> dict[Path, Path]:
    """Places that hold the tensor of an earlier place, and those places."""
    firsts: dict[Hashable, Path] = {}
    seconds: dict[Path, Path] = {}
    for path, value in flat.items():
        identity = _identity(value)
        first = path if identity is None else firsts.setdefault(identity, path)
        if first != path:
            seconds[path] = first
    return seconds


def _identity(value: Any) -> Hashable | None:
    if is_sharded(value):
        return id(value)  # the content of a module has one tensor under all names of a parameter
    if isinstance(value, Tensor) and is_rows(value) and value.numel():
        value = later(value)
    return (value.key, value.shape, value.dtype) if isinstance(value, Later) else None


def told(seconds: Mapping[str, str]) -> dict[str, str]:
    """Second and first names in the form in which they reach rank 0, beside the paths of all names."""
    return {_TIE + second: first for second, first in seconds.items()}


def give_second_names(metadata: Metadata, order: Sequence[str]) -> None:
    """Let the second names that ranks have told mean what the first ones do.

    Args:
        metadata: Of all ranks.
        order: The names as they stand in the content, where it is known.
    """
    paths, items = metadata.planner_data or {}, metadata.state_dict_metadata
    seconds = {key.removeprefix(_TIE): paths.pop(key) for key in list(paths) if key.startswith(_TIE)}
    if not seconds:
        return
    places = defaultdict(list)
    for index, place in metadata.storage_data.items():
        places[index.fqn].append((index, place))
    for second, first in seconds.items():
        items[second] = items[first]
        for index, _ in places[second]:
            del metadata.storage_data[index]
        metadata.storage_data |= {dataclasses.replace(index, fqn=second): place for index, place in places[first]}
    number = {key: index for index, key in enumerate(order)}
    metadata.state_dict_metadata = dict(sorted(items.items(), key=lambda item: number.get(item[0], len(number))))
