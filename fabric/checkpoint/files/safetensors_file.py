# SPDX-License-Identifier: Apache-2.0
"""Files of `safetensors`: a list of names, dtypes, shapes and places, and then the numbers.

Reading a local file is the package's own; it maps the file, so that of a tensor only what is copied is read.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import IO, Any

import torch
from torch import Tensor

from fabric.checkpoint.files.sums import noted, sealed
from fabric.checkpoint.files.torch_file import open_file, read_bytes
from fabric.checkpoint.state.later import Later
from fabric.plugins.io.whole_file import os_errors_name
from fabric.utilities.cloud_io import local_path
from fabric.utilities.imports import require_extra
from fabric.utilities.types import PathLike

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
# Those that not each PyTorch has.
_RARE = {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0"}
DTYPES |= {getattr(torch, name): kind for name, kind in _RARE.items() if hasattr(torch, name)}
_KINDS = {name: dtype for dtype, name in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the package's own limit


def in_file_order(tensors: Iterable[tuple[str, Later]]) -> list[tuple[str, Later]]:
    """Wide numbers first, so that each tensor begins at a multiple of the size of its numbers."""
    return sorted(tensors, key=lambda entry: -entry[1].dtype.itemsize)


def write_safetensors(
    tensors: Iterable[tuple[str, Later]], metadata: Mapping[str, str], file: IO[bytes], checksum: bool = False
) -> None:
    """Write a file, one tensor after the other.

    Args:
        tensors: By name, in the order of `in_file_order`; each is read once, when its turn has come.
        metadata: Text that is kept with them.
        file: Open for writing; with `checksum` one that can go back to its beginning.
        checksum: Whether readers shall check sums.
    """
    entries = list(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in entries:
        places = [end, end + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
        end += tensor.nbytes
    if checksum:  # the same length as below
        header["__metadata__"] |= noted([0] * len(entries))
    file.write(_as_bytes(header))
    sums = [_write_tensor(tensor, file, checksum) for _, tensor in entries]
    if checksum:
        header["__metadata__"] |= noted(sums)
        file.seek(0)
        file.write(sealed(_as_bytes(header)))


def _as_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_tensor(tensor: Later, file: IO[bytes], checksum: bool) -> int:
    number = 0
    for chunk in tensor.chunks():
        if checksum:
            number = zlib.crc32(chunk, number)
        file.write(chunk)
    return number


def read_safetensors(path: PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, those of a local one as views of it, and the text that is kept with them.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is damaged.
        ModuleNotFoundError: If `safetensors` is not installed.
    """
    require_extra(f"{os.fspath(path)}", extra="safetensors")
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    local = local_path(path)
    try:
        with os_errors_name(path):
            if local is None:
                with open_file(path) as file:
                    data = file.read()
                return load(data), _metadata_in(data)
            with open_file(local):  # the package's own error for a missing file has no number
                pass
            with safe_open(local, framework="pt", device="cpu") as opened:
                names = opened.keys()
                return {name: opened.get_tensor(name) for name in names}, opened.metadata() or {}
    except SafetensorError as error:
        raise damaged_file(path, str(error)) from error


def _metadata_in(data: bytes) -> dict[str, str]:
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return dict(header.get("__metadata__") or {})


def damaged_file(path: PathLike, what: str) -> ValueError:
    """The error for a file that makes no sense."""
    return ValueError(
        f"`{os.fspath(path)}` can't be read as a checkpoint. It is damaged or incomplete, or it was not written as"
        f" safetensors ({what.rstrip('.')})."
    )


def later_safetensors(path: PathLike) -> tuple[dict[str, Later], dict[str, str]]:
    """The same without the numbers. The package is not needed for it.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is damaged.
    """
    with os_errors_name(path), open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size, _LONGEST_HEADER):
            raise damaged_file(path, "it ends within its list of tensors")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = dict(header.pop("__metadata__", None) or {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata are no texts")
        tensors = {name: _entry(path, 8 + length, size, entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise damaged_file(path, f"{type(error).__name__}: {error}") from error
    return tensors, metadata


def _entry(path: PathLike, data: int, size: int, entry: Mapping[str, Any]) -> Later:
    dtype, shape = _KINDS[entry["dtype"]], torch.Size(entry["shape"])
    start, end = entry["data_offsets"]
    if end - start != shape.numel() * dtype.itemsize or start < 0 or data + end > size:
        raise ValueError(f"a tensor of shape {tuple(shape)} is at {start}:{end}")

    def read() -> Tensor:
        return read_bytes(path, data + start, end - start).view(dtype).reshape(shape)

    return Later(shape, dtype, read)
