# SPDX-License-Identifier: Apache-2.0
"""Finding bits that have flipped in weights that were saved as `safetensors` with `checksum=True`.

Each file has the CRC-32 of each of its tensors in its metadata, and the sum of the header in which they stand; an index
has the sum of itself. Other programs take no notice of them.
"""

import json
import struct
import zlib
from typing import IO, Any

from fabric.checkpoint.files.safetensors_file import later_safetensors
from fabric.checkpoint.files.sums import is_sealed, sums_in
from fabric.checkpoint.files.torch_file import open_file
from fabric.checkpoint.weights.places import INDEX_SUFFIX, SUFFIX
from fabric.checkpoint.weights.reading import Files

_CHUNK = 1 << 20
ADVICE = "Load another checkpoint."


def validate_weights(files: Files, share: int, shares: int) -> bool:
    """Raise if the files of weights are not what was saved.

    Args:
        files: What `find_files` found.
        share: Which of the tensors this rank checks; all else is checked on each.
        shares: How many ranks divide them among themselves.

    Returns:
        Whether they have sums at all.

    Raises:
        ValueError: If a bit has flipped, naming file and tensor.
    """
    index = None
    if set(files.files) != {files.place.stem + SUFFIX}:
        index = files.place.at(files.place.stem + INDEX_SUFFIX)
    checked = _is_checked(index) if index is not None else False
    number = 0
    for name in files.files:
        path = files.place.at(name)
        with open_file(path) as file:
            tensors = _tensors(file, path, checked)
            if tensors is not None and not checked and index is not None:
                raise _damaged(index, "its own checksum is not there")
            checked = checked or tensors is not None
            for tensor, start, size, expected in tensors or ():
                if number % shares == share and _sum_of(file, start, size) != expected:
                    raise _damaged(path, f"the checksum of `{tensor}` does not match its bytes")
                number += 1
    return checked


def _is_checked(path: str) -> bool:
    with open_file(path) as file:
        text = file.read()
    if sums_in(json.loads(text).get("metadata") or {}) is None:
        return False
    if not is_sealed(text):
        raise _damaged(path, "its own checksum does not match its bytes")
    return True


def _damaged(path: str, what: str) -> ValueError:
    return ValueError(f"`{path}` is damaged: {what}. {ADVICE}")


def _tensors(file: IO[bytes], path: str, expected: bool) -> list[tuple[str, int, int, str]] | None:
    """Name, start, size and sum of each tensor of a file; None where it has no sums, and need not."""
    later_safetensors(path)  # raises if it makes no sense at all
    file.seek(0)  # files in memory have one position for all who read them
    start = file.read(8)
    text = file.read(struct.unpack("<Q", start)[0])
    header: dict[str, Any] = json.loads(text)
    sums = sums_in(header.pop("__metadata__", None) or {})
    if sums is None and not expected:
        return None
    entries = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    if sums is None or not is_sealed(start + text) or len(sums) != len(entries):
        raise _damaged(path, "the checksum of its list of tensors does not match its bytes")
    data = 8 + len(text)
    return [(name, data + begin, end - begin, own) for (begin, end, name), own in zip(entries, sums, strict=True)]


def _sum_of(file: IO[bytes], start: int, size: int) -> str:
    file.seek(start)
    number = 0
    while size > 0 and (chunk := file.read(min(size, _CHUNK))):
        number = zlib.crc32(chunk, number)
        size -= len(chunk)
    return f"{number:08x}"
