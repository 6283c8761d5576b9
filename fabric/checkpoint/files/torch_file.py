# SPDX-License-Identifier: Apache-2.0
"""Files of `torch.save`, written and read one tensor at a time."""

import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from typing import IO, Any

import torch
from torch import Tensor

from fabric.checkpoint.state.later import Later, is_rows, later, replaced
from fabric.plugins.io import TorchCheckpointIO
from fabric.plugins.io.whole_file import os_errors_name, replacing_file
from fabric.utilities.cloud_io import local_path, open_remote, validate_is_file
from fabric.utilities.types import PathLike

_ALIGNMENT = 64  # as PyTorch's own, so that a mapped file gives aligned tensors
_BUFFER = 1 << 22
_LARGE = 1 << 30  # beyond it an entry's header is a longer one
# The dtypes that had storage classes of their own; the others are in files as bytes with a dtype.
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}


def write_torch_file(content: Any, path: PathLike, comment: bytes = b"") -> None:
    """Write what `torch.save(content, path)` writes, but bring each `Later` in it only when its turn has come.

    A file that is there is replaced when the new one is complete. PyTorch takes no notice of a `comment`.
    """
    with replacing_file(path, {}) as file:
        write_torch_archive(content, file, comment)


def write_torch_archive(content: Any, file: IO[bytes], comment: bytes = b"") -> None:
    """The same into an open file. Each `Later` is read once, in the order in which they stand in `content`."""
    structure = io.BytesIO()
    pickler = _Pickler(structure)
    pickler.dump(content)
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = comment
        _add(archive, file, "archive/data.pkl", structure.getvalue())
        _add(archive, file, "archive/byteorder", sys.byteorder.encode())
        for number, record in enumerate(pickler.records):
            _add(archive, file, f"archive/data/{number}", record)
        _add(archive, file, "archive/version", b"3\n")


def _add(archive: zipfile.ZipFile, file: IO[bytes], name: str, data: bytes | Later) -> None:
    """Stored as it is, and so that its data begin at a multiple of 64 bytes."""
    size = len(data) if isinstance(data, bytes) else data.nbytes
    entry = zipfile.ZipInfo(name)
    entry.file_size = size
    start = file.tell() + 30 + len(name) + 4 + (20 if size > _LARGE else 0)
    padding = -start % _ALIGNMENT
    entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(entry, "w", force_zip64=size > _LARGE) as target:
        for chunk in (data,) if isinstance(data, bytes) else data.chunks():
            target.write(chunk)


class _Storage:
    """What a file calls the memory of a tensor."""

    def __init__(self, kind: Any, number: int, count: int) -> None:
        self.reference = ("storage", kind, str(number), "cpu", count)


class _Pickler(pickle.Pickler):
    """Pickles tensors as PyTorch does, and lists those whose values are to follow."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.records: list[Later] = []
        self._numbers: dict[Any, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        return obj.reference if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and is_rows(obj):
            obj = later(obj)
        if not isinstance(obj, Later):
            return NotImplemented
        number = self._numbers.setdefault(obj.key, len(self.records))
        if number == len(self.records):
            self.records.append(obj)
        kind = _STORAGES.get(obj.dtype, torch.UntypedStorage)
        count = obj.nbytes if kind is torch.UntypedStorage else obj.shape.numel()
        stride = torch.empty(obj.shape, device="meta").stride()
        rest: tuple[Any, ...] = (_Storage(kind, number, count), 0, tuple(obj.shape), stride, False, OrderedDict())
        # Private names of PyTorch's, but in every file that it writes: one without them could not read its own files.
        if kind is torch.UntypedStorage:
            return torch._utils._rebuild_tensor_v3, (*rest, obj.dtype)
        return torch._utils._rebuild_tensor_v2, rest


def read_torch_file(path: PathLike, weights_only: bool = True) -> Any:
    """The content of a `torch.save` file with a `Later` in the place of each tensor; one of before PyTorch 1.6 whole.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is no such file, or damaged.
        pickle.UnpicklingError: If it holds what is refused.
    """
    content = _without_values(path, weights_only)
    if not _is_archive(path):
        return TorchCheckpointIO().load_checkpoint(path, map_location="cpu", weights_only=weights_only)
    forms: set[Any] = set()
    replaced(content, lambda tensor: forms.add(tensor.layout))
    if content is None or forms - {torch.strided}:
        content = TorchCheckpointIO().map_checkpoint(path, weights_only=weights_only)
        return replaced(content, lambda tensor: later(tensor) if is_rows(tensor) else tensor)
    return replaced(content, lambda tensor: _from_file(tensor, path))


def _without_values(path: PathLike, weights_only: bool) -> Any:
    """The content with tensors on the device `meta`; None where one has a form that can't be there."""
    try:
        return TorchCheckpointIO().load_checkpoint(path, map_location="meta", weights_only=weights_only)
    except ValueError as error:
        if not isinstance(error.__cause__, NotImplementedError):
            raise
        return None


def _is_archive(path: PathLike) -> bool:
    with os_errors_name(path), open_file(path) as file:
        return zipfile.is_zipfile(file)


def open_file(path: PathLike) -> Any:
    """A local or remote file, open for reading bytes."""
    local = local_path(path)
    if local is None:
        return open_remote(path)
    validate_is_file(local)
    return open(local, "rb")


def _from_file(tensor: Tensor, path: PathLike) -> Any:
    # Private, but the only word on where in a file a tensor is. A test would notice its absence.
    start = tensor.untyped_storage()._checkpoint_offset
    if start is None:
        return tensor  # one that had no values when it was saved
    size = tensor.untyped_storage().nbytes()
    offset, shape, stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()
    if tensor.is_contiguous():
        start, size = start + offset * tensor.dtype.itemsize, tensor.numel() * tensor.dtype.itemsize
        offset = 0
    place = (start, size)

    def read() -> Tensor:
        values = read_bytes(path, *place).view(tensor.dtype).as_strided(shape, stride, offset)
        values = values.conj() if tensor.is_conj() else values  # a bit beside the numbers, as the next one
        return -values if tensor.is_neg() else values

    return Later(
        shape, tensor.dtype, read, key=(os.fspath(path), start, tensor.dtype, shape, stride, offset, tensor.is_conj())
    )


def read_bytes(path: PathLike, start: int, size: int) -> Tensor:
    """Bytes of a file, as a tensor of dtype `uint8`.

    Raises:
        ValueError: If the file ends before.
    """
    data = torch.empty(size, dtype=torch.uint8)
    buffer = bytearray(min(size, _BUFFER))  # not the tensor's own memory: what NumPy saw could not be given back early
    with os_errors_name(path), open_file(path) as file:
        file.seek(start)
        done = 0
        while done < size:
            count = file.readinto(memoryview(buffer)[: size - done])
            if not count:
                raise ValueError(f"`{os.fspath(path)}` can't be read as a checkpoint. It is damaged or incomplete.")
            data[done : done + count] = torch.frombuffer(buffer, dtype=torch.uint8, count=count)
            done += count
    return data
