# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any layout, opened without reading their tensors, and written in any other, one tensor at a time."""

import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fabric.checkpoint.access import Attempts, StateAccess
from fabric.checkpoint.files.safetensors_file import DTYPES
from fabric.checkpoint.files.torch_file import open_file, read_torch_file, write_torch_file
from fabric.checkpoint.folder.folders import save_folder
from fabric.checkpoint.folder.marker import MARKER, is_committed, is_folder
from fabric.checkpoint.layouts import Format
from fabric.checkpoint.sources import FolderSource
from fabric.checkpoint.state.flatten import Path, problem_of_items, put
from fabric.checkpoint.state.later import Later, is_rows, later, replaced
from fabric.checkpoint.state.naming import by_name, by_number
from fabric.checkpoint.weights.places import SUFFIX, names_in_folder
from fabric.checkpoint.weights.reading import find_files, is_weights_path, read_files_later
from fabric.checkpoint.weights.saving import DEFAULT_SHARD_SIZE, Named, in_shards, note, parsed_size, write_weights
from fabric.plugins.io.whole_file import os_errors_name
from fabric.utilities.types import PathLike

_LIGHTNINGS_REST = "meta.pt"  # what Lightning Fabric's folders keep beside the tensors


@dataclass(frozen=True)
class Opened:
    """A checkpoint.

    Args:
        layout: Which one it is.
        description: That in words.
        content: What it holds, with a `Later` in the place of each tensor.
    """

    layout: Format
    description: str
    content: Any


def open_later(path: PathLike) -> Opened:
    """Open a checkpoint of any layout, or the weights of a model, without reading its tensors.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is no checkpoint, or damaged.
        pickle.UnpicklingError: If it holds what could run code.
    """
    with os_errors_name(path):
        found = is_folder(path)
        committed = found and is_committed(path)
    if committed:
        return _open_folder(path)
    files = find_files(path) if found or is_weights_path(path) else None
    if files is not None:
        kind = "safetensors" if files.are_safetensors else "torch.save"
        rest = "" if files.rest is None else f" and `{files.rest}`"
        count = f"{len(files.files)} file{'s' if len(files.files) > 1 else ''} of weights ({kind}){rest}"
        return Opened("safetensors", count, read_files_later(files))
    if found:
        raise ValueError(
            f"`{os.fspath(path)}` is a folder without `{MARKER}`, so no checkpoint was completed there: it is written"
            " last. Name another checkpoint."
        )
    content = read_torch_file(path)
    return Opened("torch", f"one file (torch.save{_version(path)})", content)


def _version(path: PathLike) -> str:
    """That of the file's format; a file of before PyTorch 1.6 has none."""
    with os_errors_name(path), open_file(path) as file:
        if not zipfile.is_zipfile(file):
            return ", before PyTorch 1.6"
        with zipfile.ZipFile(file) as archive:
            name = next((name for name in archive.namelist() if name.endswith("/version")), None)
            return f", version {archive.read(name).decode().strip()}" if name else ""


def _open_folder(path: PathLike) -> Opened:
    source = FolderSource(path)
    places = source.places()

    def on_demand(tensor: Tensor) -> Any:
        if tensor.device.type != "meta":
            return later(tensor) if is_rows(tensor) else tensor
        return Later(tensor.shape, tensor.dtype, lambda: source.fetch(tensor), places.get(id(tensor)))

    content = replaced(source.content, on_demand)
    folder = os.fspath(path).rstrip("/")
    if _LIGHTNINGS_REST in names_in_folder(folder):
        rest = read_torch_file(f"{folder}/{_LIGHTNINGS_REST}")
        content = {**content, **(rest if isinstance(rest, Mapping) else {})}
    version = f", version {source.version}" if source.version else ""
    return Opened("sharded", f"sharded folder (torch.distributed.checkpoint{version})", numbered(content))


def is_optimizer_state(value: Any) -> bool:
    """Whether a value is laid out as the state of an optimizer."""
    if not isinstance(value, Mapping) or not {"param_groups"} <= value.keys() <= {"state", "param_groups"}:
        return False
    groups = value["param_groups"]
    return isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)


def numbered(content: Any) -> Any:
    """A content of a folder with the states of its optimizers in PyTorch's own layout."""
    if is_optimizer_state(content):
        return by_number(content)
    if isinstance(content, Mapping):
        entries = {key: numbered(value) for key, value in content.items()}
        same = all(new is old for new, old in zip(entries.values(), content.values(), strict=True))
        return content if same else entries
    return [numbered(item) for item in content] if type(content) is list else content


def tensors_in(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each tensor and plain value of a content with the keys that lead to it."""
    if isinstance(content, Mapping) and content:
        for key, value in content.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(content, list | tuple) and content and any(isinstance(v, Mapping | list | Later) for v in content):
        for index, value in enumerate(content):
            yield from tensors_in(value, (*path, index))
    else:
        yield path, content


def write(
    content: Any, target: PathLike, layout: Format, access: StateAccess, max_shard_size: int | str | None = None
) -> None:
    """Write a content in a layout, one tensor after the other; what is there is replaced when it is complete.

    Args:
        content: What `open_later` gave.
        target: Where to.
        layout: Which one.
        access: A strategy of one process.
        max_shard_size: The most bytes of one file of weights with `safetensors`.

    Raises:
        ValueError: If the content does not go into that layout.
        OSError: If it can't be written.
    """
    if layout == "torch":
        write_torch_file(content, target)
    elif layout == "sharded":
        save_folder(target, _flat(content), access, Attempts())
    else:
        weights, ties, rest = _divided(content)
        one_file = os.fspath(target).endswith(SUFFIX)
        size = parsed_size(DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size)
        write_weights(target, in_shards(weights, float("inf") if one_file else size), ties, rest)


def _flat(content: Any) -> dict[Path, Any]:
    """The items of a folder: tensors, and plain values with no tensor in them."""
    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a `{type(content).__name__}` and not a dictionary, so it is no checkpoint")
    flat: dict[Path, Any] = {}
    for key, value in content.items():
        _flatten(value, (str(key),), flat)
    problem = problem_of_items(flat)
    if problem is not None:
        raise ValueError(problem)
    return flat


def _flatten(value: Any, path: Path, flat: dict[Path, Any]) -> None:
    if is_optimizer_state(value):
        state = by_name(value)
        for name, entries in state["state"].items():
            _flatten(entries, (*path, "state", str(name)), flat)
        for index, group in enumerate(state["param_groups"]):
            flat.update({(*path, "param_groups", index, str(option)): item for option, item in group.items()})
    elif not _holds_later(value) or isinstance(value, Later):
        put(flat, path, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(item, (*path, str(key)), flat)
    else:
        for index, item in enumerate(value):
            _flatten(item, (*path, index), flat)


def _holds_later(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_later, value.values()))
    return isinstance(value, Later) or (isinstance(value, list | tuple) and any(map(_holds_later, value)))


def _divided(content: Any) -> tuple[Named, dict[str, str], Any]:
    """The weights in a content, second names among them, and the rest.

    A model's weights are a dictionary of names and tensors, and nothing else, outside of an optimizer's state.
    """
    found: list[tuple[tuple[Any, ...], Mapping[str, Later]]] = []
    rest = _without_weights(content, (), found)
    if not found:
        raise ValueError("it holds no weights: no dictionary of names and tensors. Choose another format")
    weights: Named = []
    ties: dict[str, str] = {}
    notes = []
    for path, values in found:
        prefix = "".join(f"{key}." for key in path) if len(found) > 1 else ""
        firsts: dict[Any, str] = {}
        for name, value in values.items():
            first = firsts.setdefault((value.key, value.shape), prefix + name)
            if first == prefix + name:
                weights.append((first, value))
            else:
                ties[prefix + name] = first
        notes.append(note(path, prefix, list(values), {}, getattr(values, "_metadata", None)))
    return weights, ties, None if rest is None else {"fabric": 1, "state": rest, "modules": notes}


def _without_weights(value: Any, path: tuple[Any, ...], found: list[Any]) -> Any:
    if _are_weights(value):
        found.append((path, value))
        return None
    if is_optimizer_state(value) or not isinstance(value, Mapping):
        return value
    entries = {key: _without_weights(item, (*path, key), found) for key, item in value.items()}
    return OrderedDict(entries) if isinstance(value, OrderedDict) else entries


def _are_weights(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    if not all(isinstance(name, str) and isinstance(item, Later) for name, item in value.items()):
        return False
    return all(item.dtype in DTYPES for item in value.values())
