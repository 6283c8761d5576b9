# SPDX-License-Identifier: Apache-2.0
"""The metadata of a folder, read without running anything that it holds, and checked before anybody relies on it."""

import enum
import io
import math
import pathlib
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from fabric.checkpoint.folder.marker import MARKER, damaged, damaged_data
from fabric.plugins.io.contents import validate_pickle

# What `pickle` may look up for such a file. Two of the names are private ones of PyTorch's: they are in every file that
# it writes, so a PyTorch without them could not read its own files.
_CLASSES = (
    *(dcp.Metadata, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata),
    *(dcp.TensorProperties, dcp.MetadataIndex, dcp.StorageMeta, dcp._MEM_FORMAT_ENCODING, filesystem._StorageInfo),
    *(torch.Size, torch.serialization._get_layout),
)
_ALLOWED: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}
_ALLOWED |= {("torch", str(t).removeprefix("torch.")): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
# Before PyTorch 2.4 these two were in another place.
_FORMER = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED[_FORMER, "TensorProperties"] = dcp.TensorProperties
_ALLOWED[_FORMER, "MEM_FORMAT_ENCODING"] = dcp._MEM_FORMAT_ENCODING
_MOST_NUMBERS = 1 << 60  # of one tensor: more can't be counted
_PATHS = re.compile(r"(Pure)?(Posix|Windows)?Path")


def read_metadata(file: IO[bytes], path: str, weights_only: bool = True) -> Metadata:
    """Unpickle the metadata of `torch.distributed.checkpoint`, and nothing else.

    Args:
        file: Its file.
        path: The folder, for errors.
        weights_only: False unpickles anything, which can run code.

    Raises:
        pickle.UnpicklingError: If it asks for anything but what such a file is made of.
        ValueError: If it is damaged, or its parts do not fit together.
    """
    data = file.read()
    try:
        validate_pickle(data)
        metadata = (_Unpickler if weights_only else pickle.Unpickler)(io.BytesIO(data)).load()
    except OSError:
        raise
    except _RefusedError as error:
        raise pickle.UnpicklingError(
            f"The `{MARKER}` of `{path}` asks for `{error}`, which is not part of a checkpoint's metadata and is not"
            " loaded, since unpickling it can run code. If you trust the folder, pass `weights_only=False`."
        ) from None
    except Exception as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    try:
        problem = _problem(metadata)
    except (AttributeError, TypeError, ValueError) as error:  # a part of it is of another kind than it should be
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    if problem is not None:
        raise damaged(path, problem)
    return metadata  # type: ignore[no-any-return]


class _RefusedError(Exception):
    """The name of something that is not in the list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module.split(".")[0] == "pathlib" and _PATHS.fullmatch(name):
            return pathlib.PurePosixPath  # where the folder once was; a path of another system can't be made here
        if (module, name) == ("builtins", "getattr"):
            return _member  # how Python 3.11 pickles the member of an enumeration
        raise _RefusedError(f"{module}.{name}")


def _member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise _RefusedError(f"getattr({kind!r}, {name!r})")
    return kind[name]


def _problem(metadata: Any) -> str | None:
    """What does not fit together in it; None if all does."""
    if not isinstance(metadata, Metadata):
        return f"it holds a `{type(metadata).__name__}`"
    items, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(items, dict) or not isinstance(places, dict):
        return "it has no list of items"
    if not isinstance(metadata.planner_data, dict | None):
        return "it has no list of paths"
    if not all(map(_is_path, (metadata.planner_data or {}).values())):
        return "it has a path that is none"
    for key, item in items.items():
        problem = _problem_of_item(key, item, places)
        if problem is not None:
            return f"`{key}` {problem}"
    return next(filter(None, map(_problem_of_place, places.values())), None)


def _problem_of_item(key: Any, item: Any, places: Mapping[Any, Any]) -> str | None:
    if isinstance(item, BytesStorageMetadata):
        return None if MetadataIndex(key) in places else "is nowhere"
    if not isinstance(item, TensorStorageMetadata) or not isinstance(item.properties.dtype, torch.dtype):
        return f"is a `{type(item).__name__}`"
    if not _is_shape(item.size):
        return f"has the shape {item.size!r}"
    return _problem_of_chunks(key, item, places)


def _problem_of_chunks(key: Any, item: TensorStorageMetadata, places: Mapping[Any, Any]) -> str | None:
    for chunk in item.chunks:
        if len(chunk.offsets) != len(item.size) or len(chunk.sizes) != len(item.size):
            return "has a part of another shape"
        if any(
            o < 0 or n < 0 or o + n > size for o, n, size in zip(chunk.offsets, chunk.sizes, item.size, strict=True)
        ):
            return "has a part outside of itself"
        if math.prod(chunk.sizes) and MetadataIndex(key, chunk.offsets) not in places:
            return "has a part that is nowhere"
    if sum(math.prod(chunk.sizes) for chunk in item.chunks) < math.prod(item.size):
        return "is not all there"
    return "has parts that overlap" if _overlap(item.chunks) else None


def _is_path(path: Any) -> bool:
    return isinstance(path, tuple | list) and bool(path) and all(type(step) in (str, int) for step in path)


def _is_shape(size: Any) -> bool:
    if not isinstance(size, tuple) or not all(type(n) is int and n >= 0 for n in size):
        return False
    numbers: int = math.prod(max(n, 1) for n in size)
    return numbers < _MOST_NUMBERS


def _overlap(chunks: Sequence[Any]) -> bool:
    """Whether two parts of a tensor have a number in common; if they have, another one may be in none of them."""
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if math.prod(chunk.sizes)]
    if len(boxes) < 2 or not boxes[0][0]:
        return False
    # Along the dimension with most parts, so that few others reach into each of them.
    dim = max(range(len(boxes[0][0])), key=lambda dim: len({start[dim] for start, _ in boxes}))
    boxes.sort(key=lambda box: box[0][dim])
    for index, (start, size) in enumerate(boxes):
        for after in range(index + 1, len(boxes)):
            other, other_size = boxes[after]
            if other[dim] >= start[dim] + size[dim]:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(start, size, other, other_size, strict=True)):
                return True
    return False


def _problem_of_place(place: Any) -> str | None:
    if not isinstance(place, filesystem._StorageInfo) or not isinstance(place.relative_path, str):
        return "an item has no place"
    name = pathlib.PurePosixPath(place.relative_path)
    if name.is_absolute() or ".." in name.parts or "\0" in place.relative_path or not name.parts:
        return f"`{name}` is outside of the folder"
    if type(place.offset) is not int or type(place.length) is not int or place.offset < 0 or place.length < 0:
        return f"`{name}` has a part of no size"
    if place.transform_descriptors:
        return f"`{name}` has a part that is encoded by {place.transform_descriptors}"
    return None


def validate_sizes(metadata: Metadata, path: str, size_of: Callable[[str], int | None]) -> None:
    """Raise unless all data files are there and as long as the metadata says.

    Args:
        metadata: What `read_metadata` gave.
        path: The folder, for errors.
        size_of: From the name of a file in the folder to its size in bytes; None where there is none.
    """
    ends: dict[str, int] = defaultdict(int)
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends[place.relative_path], place.offset + place.length)
    for name, end in sorted(ends.items()):
        size = size_of(name)
        if size is None or size < end:
            what = "is missing" if size is None else f"has {size} bytes of {end}"
            raise damaged_data(path, f"`{name}` {what}")
