# SPDX-License-Identifier: Apache-2.0
"""The marks by which a reader knows that it shall check sums, and sums of texts that hold their own."""

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

MARK = b"fabric checksums: crc32"  # as the comment of an archive of `torch.save`, and after the metadata of a folder
# In the metadata of safetensors, two of them, so that no single flipped bit hides that there are sums.
_KIND, _SUMS = "fabric.checksum", "fabric.sums"
KEYS = (_KIND, _SUMS)
_OWN = re.compile(rb'("fabric\.sums": ?")([0-9a-f]{8})')
_NONE = "00000000"


def noted(sums: list[int]) -> dict[str, str]:
    """What the metadata of a file says: the sum of the text in which it stands, to be set by `sealed`, and others."""
    return {_KIND: "crc32", _SUMS: " ".join([_NONE, *(f"{number:08x}" for number in sums)])}


def sums_in(metadata: Mapping[str, Any]) -> list[str] | None:
    """The other sums in the metadata of a file; None where it has none at all."""
    if not any(key in metadata for key in KEYS):
        return None
    return str(metadata.get(_SUMS)).split(" ")[1:]


def sealed(text: bytes) -> bytes:
    """The text with the sum of all of it in its place."""
    return _OWN.sub(lambda found: found[1] + f"{zlib.crc32(text):08x}".encode(), text, count=1)


def is_sealed(text: bytes) -> bool:
    """Whether a text is what `sealed` returned."""
    return sealed(_OWN.sub(lambda found: found[1] + _NONE.encode(), text, count=1)) == text and bool(_OWN.search(text))


def sum_of(metadata: bytes) -> bytes:
    """What follows the metadata of a folder in its file."""
    return MARK + f" {zlib.crc32(metadata):08x}".encode()


@contextmanager
def writing_sums() -> Iterator[None]:
    """Inside, PyTorch writes the sums, though the user may have told it not to."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
