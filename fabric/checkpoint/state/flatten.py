# SPDX-License-Identifier: Apache-2.0
"""Between nested contents and the flat keys of a folder, as `torch.distributed.checkpoint` names them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.checkpoint.state.shards import holds_sharded
from fabric.checkpoint.state.tree import holds_stateful, is_stateful

Path = tuple[str | int, ...]


def key_of(path: Path) -> str:
    """`("optimizer", "param_groups", 0, "lr")` -> `optimizer.param_groups.0.lr`."""
    return ".".join(map(str, path))


def flatten(content: Mapping[Any, Any], state: Any) -> dict[Path, Any]:
    """The items of a folder by their paths: each tensor of a module or optimizer, and each plain value of the user's.

    The state of another object stays one item, unless it holds sharded tensors.

    Args:
        content: The states, with those of optimizers by name.
        state: What they were taken from.

    Raises:
        ValueError: If two items would have the same key, or a tensor has a form that folders don't hold.
    """
    flat: dict[Path, Any] = {}
    for key, value in content.items():
        _flatten(value, state[key], (str(key),), flat)
    problem = problem_of_items(flat)
    if problem is not None:
        raise ValueError(f"`fabric.save`: {problem}")
    return flat


def problem_of_items(flat: Mapping[Path, Any]) -> str | None:
    """What a folder can't hold; None if it can hold all of it."""
    keys: dict[str, Path] = {}
    for path, value in flat.items():
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_quantized):
            form = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
            return f"`{key_of(path)}` is a {form} tensor, which PyTorch can't keep in a folder. Use `format='torch'`."
        other = keys.setdefault(key_of(path), path)
        if other != path:
            return (
                f"two values would have the key `{key_of(path)}` in the folder, at {list(other)} and at {list(path)}."
                " Rename one of them in `state`."
            )
    return None


def _flatten(value: Any, origin: Any, path: Path, flat: dict[Path, Any]) -> None:
    if isinstance(origin, Optimizer) and value.keys() == {"state", "param_groups"}:
        _flatten_optimizer(value, path, flat)
    elif isinstance(value, Mapping) and value and _has_parts(value, origin):
        for key, item in value.items():
            _flatten(item, _inner(origin, key), (*path, str(key)), flat)
    elif type(value) in (list, tuple) and value and _has_parts(value, origin):
        for index, item in enumerate(value):
            _flatten(item, _inner(origin, index), (*path, index), flat)
    else:
        put(flat, path, value)


def put(flat: dict[Path, Any], path: Path, value: Any) -> None:
    """Add an item.

    Raises:
        ValueError: If one is there already, since keys such as `1` and `"1"` are the same as text.
    """
    if path in flat:
        raise ValueError(
            f"two values would have the key `{key_of(path)}` in the folder, where keys are text. Rename one of them."
        )
    flat[path] = value


def _flatten_optimizer(value: Mapping[str, Any], path: Path, flat: dict[Path, Any]) -> None:
    for name, entries in value["state"].items():
        if not isinstance(entries, Mapping):
            flat[(*path, "state", str(name))] = entries
            continue
        for entry, item in entries.items():
            _flatten(item, None, (*path, "state", str(name), str(entry)), flat)
    for index, group in enumerate(value["param_groups"]):
        for option, item in group.items():
            flat[(*path, "param_groups", index, option)] = item


def _has_parts(value: Any, origin: Any) -> bool:
    if not is_stateful(origin) and holds_stateful(origin):
        return True
    if isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values()):
        return True
    return holds_sharded(value)


def _inner(origin: Any, key: Any) -> Any:
    if is_stateful(origin) or not isinstance(origin, Mapping | list | tuple):
        return None
    return origin[key]


class _Node(dict[str | int, Any]):
    """A place with more below it; a dictionary that is a value is none."""


def unflatten(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """The nested content: numbers in a path are places in a list.

    Raises:
        ValueError: If a value and others would stand at one place.
    """
    tree = _Node()
    for path, value in flat.items():
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step, _Node())
            if not isinstance(node, _Node):
                raise ValueError(f"`{key_of(path)}` is in a value")
        if path[-1] in node:
            raise ValueError(f"`{key_of(path)}` is there twice")
        node[path[-1]] = value
    return {str(key): _nested(item) for key, item in tree.items()}


def _nested(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    if all(type(key) is int for key in node):
        return [_nested(node[index]) for index in sorted(node)]
    return {key: _nested(item) for key, item in node.items()}
