# SPDX-License-Identifier: Apache-2.0
"""Where a content comes from: a file, whose tensors are there, or a folder, whose tensors are read when wanted."""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fabric.checkpoint.folder.marker import MARKER, damaged, is_committed, is_folder
from fabric.checkpoint.state.flatten import unflatten
from fabric.checkpoint.state.later import replaced
from fabric.checkpoint.state.shards import is_sharded, placed_like
from fabric.checkpoint.weights.reading import find_files, is_weights_path, read_files
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.plugins.io.whole_file import os_errors_name
from fabric.utilities.cloud_io import local_path
from fabric.utilities.parameter_names import rebuilt
from fabric.utilities.types import PathLike


class Source(Protocol):
    """A content to restore from.

    Attributes:
        content: The nested states. Tensors have their shapes and dtypes, but not always their values.
        is_folder: Whether the values of tensors are still to be read, by `fill` or `fetch`.
        is_ready: Whether all values are there and belong to whoever takes them.
        is_weights: Whether it is known to hold the weights of a model and nothing else.
    """

    content: dict[str, Any]
    is_folder: bool
    is_ready: bool
    is_weights: bool

    def fill(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Read into the first of each pair what the second, a tensor of a folder's content, stands for."""

    def validate(self, others: Any, share: int = 0, shares: int = 1) -> None:
        """Raise if what is to be read can't be, as far as that can be told without reading its numbers.

        Args:
            others: The part of the content that nobody asks for.
            share: Which of the parts of tensors to look at.
            shares: How many ranks divide them among themselves.
        """

    def fetch(self, value: Any, like: Any = None) -> Any:
        """A part of the content with its values; tensors are sharded where those in `like`, at the same place, are."""


class FileSource:
    """What a file holds.

    Args:
        content: What was read.
        is_mapped: Whether its tensors are views of the file: whoever keeps one needs a copy.
        is_weights: Whether it holds the weights of a model and nothing else.
    """

    is_folder = False

    def __init__(self, content: dict[str, Any], is_mapped: bool, is_weights: bool = False) -> None:
        self.content = content
        self.is_weights = is_weights
        self.is_ready = not is_mapped

    def fill(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Nothing is left to read."""

    def validate(self, others: Any, share: int = 0, shares: int = 1) -> None:
        """It was read already."""

    def fetch(self, value: Any, like: Any = None) -> Any:
        """The value, with copies of what belongs to the file."""

        def copied(tensor: Tensor, like: Any) -> Tensor:
            if is_sharded(like) and like.shape == tensor.shape:
                return placed_like(tensor, like)
            return tensor.clone()

        return value if self.is_ready else with_tensors(value, copied, like)


class FolderSource:
    """What a folder holds; plain values at once, tensors on demand.

    Args:
        path: The folder.
        weights_only: Whether to refuse pickled objects.

    Raises:
        ValueError: If it is damaged or incomplete.
        pickle.UnpicklingError: If it holds what is refused.
    """

    is_folder = True
    is_ready = False
    is_weights = False

    def __init__(self, path: PathLike, weights_only: bool = True) -> None:
        from fabric.checkpoint.folder import dcp  # as slow to import as torch

        self._dcp = dcp
        self._path = os.fspath(path)
        self._weights_only = weights_only
        with os_errors_name(path):
            self._metadata = dcp.open_metadata(self._path, weights_only)
            items = self._metadata.state_dict_metadata
            values = self._read({key: None for key, item in items.items() if not dcp.is_tensor(item)})
        self.version: str | None = self._metadata.version
        self._stand_ins = {key: _stand_in(item) for key, item in items.items() if dcp.is_tensor(item)}
        self._keys = {id(tensor): key for key, tensor in self._stand_ins.items()}
        paths = self._metadata.planner_data or {}
        everything = {**values, **self._stand_ins}
        try:
            self.content = unflatten({tuple(paths.get(key, (key,))): everything[key] for key in items})
        except (ValueError, TypeError) as error:
            raise damaged(self._path, str(error)) from error

    def _read(self, wanted: dict[str, Tensor | None]) -> dict[str, Any]:
        with os_errors_name(self._path):
            return self._dcp.read(self._path, self._metadata, wanted, self._weights_only) if wanted else {}

    def validate(self, others: Any, share: int = 0, shares: int = 1) -> None:
        """Look at the parts of a local folder; over a URL that would take as long as reading them."""
        left: set[str] = set()
        replaced(others, lambda tensor: left.add(self._keys.get(id(tensor), "")))
        local = local_path(self._path)
        if local is not None:
            from fabric.checkpoint.folder.parts import validate_parts  # as slow to import as torch

            with os_errors_name(self._path):
                validate_parts(local, self._metadata, self._stand_ins.keys() - left, self._path, share, shares)

    def places(self) -> dict[int, Hashable]:
        """By the id of each tensor of the content, where it lies: that of one with several names is the same."""
        parts: dict[str, list[Any]] = {}
        for index, place in self._metadata.storage_data.items():
            parts.setdefault(index.fqn, []).append((tuple(index.offset or ()), place.relative_path, place.offset))
        return {number: tuple(sorted(parts[key])) for number, key in self._keys.items() if key in parts}

    def fill(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Read into the first of each pair what the second stands for; of a shard, this rank's part only."""
        self._read({self._keys[id(stand_in)]: target.detach() for target, stand_in in pairs})

    def fetch(self, value: Any, like: Any = None) -> Any:
        """The value with new tensors in the place of those that stand for them."""
        pairs = []

        def allocated(stand_in: Tensor, like: Any) -> Tensor:
            if id(stand_in) not in self._keys:
                return stand_in
            if is_sharded(like) and like.shape == stand_in.shape:
                target = torch.empty_like(like, dtype=stand_in.dtype, requires_grad=False)
            else:
                target = torch.empty(stand_in.shape, dtype=stand_in.dtype)
            pairs.append((target, stand_in))
            return target

        fetched = with_tensors(value, allocated, like)
        self.fill(pairs)
        return fetched


def _stand_in(item: Any) -> Tensor:
    """Has shape and dtype, and no memory."""
    return torch.empty(item.size, dtype=item.properties.dtype, device="meta")


def with_tensors(value: Any, function: Callable[[Tensor, Any], Tensor], like: Any = None) -> Any:
    """The same dictionaries, lists and tuples with `function(tensor, like)` in the place of each tensor."""
    if isinstance(value, Tensor):
        return function(value, like)
    if isinstance(value, Mapping):
        others = like if isinstance(like, Mapping) else {}
        entries = {key: with_tensors(item, function, others.get(key)) for key, item in value.items()}
        return rebuilt(value, entries) if isinstance(value, OrderedDict) else entries
    if type(value) in (list, tuple):
        items = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
        return type(value)(with_tensors(item, function, other) for item, other in zip(value, items, strict=True))
    return value


def open_source(path: PathLike, io: CheckpointIO, *, weights_only: bool, mapped: bool) -> Source:
    """Open a file or folder for reading.

    Args:
        path: A local path or URL.
        io: Reads files.
        weights_only: Whether to refuse pickled objects.
        mapped: Whether tensors of a local file shall be read when they are copied, since this rank needs a part only.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is no checkpoint, or damaged.
    """
    if _is_committed(path, io):
        return FolderSource(path, weights_only)
    weights = _weights_source(path, io, weights_only) if is_weights_path(path) else None
    if weights is not None:
        return weights
    try:
        if mapped:
            content = io.map_checkpoint(path, weights_only=weights_only)
        else:
            content = io.load_checkpoint(path, map_location="cpu", weights_only=weights_only)
    except (FileNotFoundError, IsADirectoryError):
        if not isinstance(io, TorchCheckpointIO) or not is_folder(path):
            raise
        return _weights_in_folder(path, io, weights_only)
    if not isinstance(content, dict):
        raise ValueError(
            f"`{os.fspath(path)}` holds a `{type(content).__name__}` and not a dictionary, so it is no checkpoint."
            " Read it with `torch.load`."
        )
    return FileSource(content, is_mapped=mapped)


def _weights_source(path: PathLike, io: CheckpointIO, weights_only: bool) -> FileSource | None:
    files = find_files(path) if isinstance(io, TorchCheckpointIO) else None
    if files is None:
        return None
    content = read_files(files, io, weights_only)
    return FileSource(content, is_mapped=local_path(path) is not None, is_weights=files.rest is None)


def _weights_in_folder(path: PathLike, io: CheckpointIO, weights_only: bool) -> FileSource:
    weights = _weights_source(path, io, weights_only)
    if weights is None:
        raise ValueError(
            f"`{os.fspath(path)}` is a folder without `{MARKER}`, so no checkpoint was completed there: it is written"
            " last. Load another checkpoint."
        ) from None
    return weights


def _is_committed(path: PathLike, io: CheckpointIO) -> bool:
    try:
        with os_errors_name(path):
            return is_committed(path)
    except (ValueError, ModuleNotFoundError):
        if isinstance(io, TorchCheckpointIO):
            raise
        return False  # a path that only the user's plugin understands
