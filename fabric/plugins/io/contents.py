# SPDX-License-Identifier: Apache-2.0
"""What a file of `torch.save` can't be: an archive that grows when it is read, or a content without an end."""

import pickletools
import zipfile
from collections.abc import Iterable
from typing import Any

_ARCHIVE = b"PK\3\4"  # what PyTorch tells its archives by
_MOST_LEVELS = 200  # beyond some hundred Python itself gives up
_MANY = 1_000_000
_OFTEN = 100


def records_of(source: Any) -> list[zipfile.ZipInfo]:
    """The records of an archive of `torch.save`, none of which is longer in memory than in the file.

    Args:
        source: A local path, or a binary file that can seek; it is left at its start.

    Returns:
        None at all where it is no archive.

    Raises:
        ValueError: If a record is compressed, which none of `torch.save` is.
        zipfile.BadZipFile: If it begins as an archive and is none.
    """
    if not hasattr(source, "seek"):
        with open(source, "rb") as file:
            return records_of(file)
    records: list[zipfile.ZipInfo] = []
    source.seek(0)
    if source.read(len(_ARCHIVE)) == _ARCHIVE:
        with zipfile.ZipFile(source) as archive:
            records = archive.infolist()
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise ValueError(f"the record {record.filename!r} is compressed, which `torch.save` never does")
    source.seek(0)
    return records


def validate_pickle(data: bytes) -> None:
    """Raise if a pickle asks for more memory than it could ever fill, which Python would allocate and clear.

    Raises:
        ValueError: If it does, or is no pickle.
    """
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise ValueError(f"its objects can't have numbers as high as {argument}")


def validate_nesting(content: Any) -> None:
    """Raise if a content can't be walked through: if it contains itself, is nested too deep, or parts recur too often.

    Raises:
        ValueError: If it is so.
    """
    weights: dict[int, int] = {}
    if isinstance(content, dict | list | tuple) and _weight(content, 0, weights) > max(_MANY, _OFTEN * len(weights)):
        raise ValueError("parts of it recur so often that it would never fit into memory")


def _weight(value: Any, level: int, weights: dict[int, int]) -> int:
    """How many containers there are in a value, each counted as often as it recurs; 0 while one is being counted."""
    known = weights.get(id(value))
    if known is not None:
        if not known:
            raise ValueError("it contains itself")
        return known
    if level > _MOST_LEVELS:
        raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
    weights[id(value)] = 0
    items: Iterable[Any] = value.values() if isinstance(value, dict) else value
    weight = 1
    for item in items:
        if isinstance(item, dict | list | tuple):
            weight += _weight(item, level + 1, weights)
    weights[id(value)] = weight
    return weight


def in_short(error: BaseException) -> str:
    """The kind of an error, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"
