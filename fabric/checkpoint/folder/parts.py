# SPDX-License-Identifier: Apache-2.0
"""Whether the parts of tensors in a local folder can be read, found out before the first of them is.

Each part is an archive of `torch.save` of its own. Those of one shape and dtype are equal but for their numbers and the
sums of these, so only the first of them is opened; the rest of the others is compared with it. The numbers themselves
are not looked at.
"""

import io
import os
import struct
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fabric.checkpoint.checksum import Slice, is_of_tensor
from fabric.checkpoint.folder.marker import damaged_data
from fabric.plugins.io.contents import in_short, records_of

_ENDS = 8192  # bytes at either end of a long part, between which there are numbers only
_CONTENTS = struct.Struct("<4s6H3L5H2L")  # an entry of an archive's list of contents, before its name
_END = struct.Struct("<4s4H2LH")  # the end of an archive


def validate_parts(
    folder: str, metadata: Metadata, keys: Collection[str], path: str, share: int = 0, shares: int = 1
) -> None:
    """Raise unless all parts of some tensors are what the metadata says.

    Args:
        folder: A local one.
        metadata: Its metadata, which was checked.
        keys: Of the tensors.
        path: What the user calls it.
        share: Which of the parts to look at.
        shares: How many there are who divide them among themselves.

    Raises:
        ValueError: If a part is damaged.
    """
    items = metadata.state_dict_metadata
    places = [(index, place) for index, place in metadata.storage_data.items() if index.fqn in keys]
    places.sort(key=lambda entry: (entry[1].relative_path, entry[1].offset))
    sizes = {MetadataIndex(key, chunk.offsets): tuple(chunk.sizes) for key in keys for chunk in _chunks(items[key])}
    known: set[Any] = set()
    for name, parts in groupby(places[share::shares], key=lambda entry: entry[1].relative_path):
        with open(os.path.join(folder, name), "rb") as file:
            for index, place in parts:
                try:
                    _validate(Slice(file, place.offset, place.length), place.length, sizes.get(index), known)
                except OSError:
                    raise
                except Exception as error:  # PyTorch has all kinds of them
                    raise damaged_data(path, f"`{index.fqn}` in `{name}` ({in_short(error)})") from error


def _chunks(item: Any) -> list[Any]:
    return item.chunks if isinstance(item, TensorStorageMetadata) else []


def _validate(part: Slice, length: int, size: tuple[int, ...] | None, known: set[Any]) -> None:
    form = _form(part, length)
    if form is not None and (size, form) in known:
        return
    stream = io.BufferedReader(part)
    held = [record.file_size for record in records_of(stream) if is_of_tensor(record)]
    tensor = torch.load(stream, map_location="meta", weights_only=True)
    if not isinstance(tensor, Tensor) or (size is not None and tuple(tensor.shape) != size):
        what = f"a tensor of {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise ValueError(f"it holds {what} and not one of {size}")
    if tensor.numel() and tensor.untyped_storage().nbytes() not in held:
        raise ValueError("it has another number of bytes than its tensor")
    known.add((size, form))


def _form(part: Slice, length: int) -> bytes | None:
    """The bytes of a part without the numbers and their sums; None where it is laid out in another way."""
    ends = _Ends(part, length)
    try:
        return b"".join(_pieces(ends, length))
    except (struct.error, IndexError):
        return None


class _Ends:
    """The bytes at both ends of a part."""

    def __init__(self, part: Slice, length: int) -> None:
        part.seek(0)
        self._head = part.read(length if length <= 2 * _ENDS else _ENDS)
        self._start = len(self._head)
        self._tail = b""
        if length > len(self._head):
            self._start = max(length - _ENDS, 0)
            part.seek(self._start)
            self._tail = part.read(_ENDS)

    def between(self, start: int, end: int) -> bytes:
        """Raises `IndexError` for others."""
        if 0 <= start <= end <= len(self._head):
            return self._head[start:end]
        if self._start <= start <= end <= self._start + len(self._tail):
            return self._tail[start - self._start : end - self._start]
        raise IndexError


def _pieces(ends: _Ends, length: int) -> Iterator[bytes]:
    end = ends.between(length - _END.size, length)
    *_, size, contents, _ = _END.unpack(end)
    at = 0
    for start, count, described in _varying(ends.between(contents, contents + size)):
        names = sum(struct.unpack("<2H", ends.between(start + 26, start + 30)))
        yield ends.between(at, start + 14)
        yield ends.between(start + 18, start + 30 + names)
        at = start + 30 + names + count
        if described:  # the sum stands behind the numbers too
            yield ends.between(at, at + 4)
            at += 8
    yield ends.between(at, contents)
    yield from _entries(ends.between(contents, contents + size))
    yield end


def _varying(contents: bytes) -> list[tuple[int, int, bool]]:
    """Where the records begin whose bytes differ between like parts, how long they are, and whether the sum follows."""
    found = []
    for fields, name in _listed(contents):
        if _varies(name) and fields[9]:
            found.append((fields[16], fields[9], bool(fields[3] & 8)))
    return sorted(found)


def _varies(name: bytes) -> bool:
    return b"/data/" in name or name.endswith(b"serialization_id")


def _entries(contents: bytes) -> Iterator[bytes]:
    for fields, name in _listed(contents):
        varies = _varies(name)
        yield repr((*fields[:7], 0 if varies else fields[7], *fields[8:])).encode() + name


def _listed(contents: bytes) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    at = 0
    while at < len(contents):
        fields = _CONTENTS.unpack_from(contents, at)
        end = at + _CONTENTS.size + sum(fields[10:13])
        yield fields, contents[at + _CONTENTS.size : end]
        at = end
