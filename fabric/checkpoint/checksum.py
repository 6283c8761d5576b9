# SPDX-License-Identifier: Apache-2.0
"""Finding bits that have flipped in a checkpoint, before anything of it is used.

`torch.save` writes zip archives, in which each record has its CRC-32; PyTorch's reader does not look at it. Folders
hold one such archive for each part of a tensor. So the sums are there already, and what `checksum=True` adds is a mark
that says that readers shall check them: the comment of the archive, and in a folder the end of `.metadata`, with the
sum of the metadata itself. PyTorch's own readers take no notice of either. Files of `safetensors` have no sums: they
get some in their metadata (`weights/checking.py`).
"""

import errno
import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from fabric.checkpoint.files.sums import MARK, sum_of, writing_sums
from fabric.checkpoint.files.torch_file import open_file
from fabric.checkpoint.folder.marker import MARKER, is_committed, is_folder
from fabric.checkpoint.weights.checking import ADVICE, validate_weights
from fabric.checkpoint.weights.reading import find_files, is_weights_path
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.plugins.io.refused import key_of_record
from fabric.plugins.io.torch_io import write_archive
from fabric.plugins.io.whole_file import os_errors_name, replacing_file
from fabric.utilities.cloud_io import local_path
from fabric.utilities.types import PathLike

_END = 22  # bytes of the last record of a zip archive without a comment, whose last two are the comment's length
_CHUNK = 1 << 20


def write_marked_file(content: Any, path: PathLike) -> None:
    """Write a file of `torch.save` whose sums are to be checked; one that is there is replaced at the end."""
    with replacing_file(path, {}) as file, writing_sums():
        marked = _Marked(file)
        write_archive(content, marked)
        marked.close()


class _Marked:
    """Takes an archive in pieces, and gives it a comment. Files on other machines can't be changed afterwards."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._last = b""

    def write(self, data: Any) -> int:
        """Write all but the last bytes, which may be those that say how long the comment is."""
        view = memoryview(data).cast("B")
        if len(view) < _END:
            together = self._last + view
            self._file.write(together[:-_END])
            self._last = together[-_END:]
        else:
            self._file.write(self._last)
            self._file.write(view[:-_END])
            self._last = bytes(view[-_END:])
        return len(view)

    def flush(self) -> None:
        """The rest is written at the end."""

    def close(self) -> None:
        """Write the end, with the comment."""
        self._file.write(self._last[:-2] + len(MARK).to_bytes(2, "little") + MARK)


def validate_sums(path: PathLike, io: CheckpointIO, weights_only: bool = True, share: int = 0, shares: int = 1) -> None:
    """Raise if a checkpoint that was saved with `checksum=True` is not what was saved.

    Args:
        path: A file or folder. Where nothing is, or what has no sums, nothing is done.
        io: Reads files.
        weights_only: Whether to refuse what may not be in the metadata of a folder.
        share: Which of the parts of tensors this rank checks; all else is checked on each.
        shares: How many ranks divide them among themselves.

    Raises:
        ValueError: If a bit has flipped, naming file and tensor.
        OSError: If it can't be read.
    """
    if not isinstance(io, TorchCheckpointIO):
        return
    with os_errors_name(path):
        if is_committed(path):
            _validate_folder(os.fspath(path), weights_only, share, shares)
            return
        if is_weights_path(path) or is_folder(path):
            _validate_weights(path, share, shares)
            return
        try:
            file = open_file(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return  # whoever reads it will say so
        with file:
            if _is_marked(file):
                _validate_file(file, path, share, shares)


def _validate_weights(path: PathLike, share: int, shares: int) -> None:
    """Those of `safetensors`, and what stands beside them, which is a file of `torch.save`."""
    try:
        files = find_files(path)
    except FileNotFoundError:
        return  # as above
    if files is None or not files.are_safetensors or not validate_weights(files, share, shares) or files.rest is None:
        return
    rest = files.place.at(files.rest)
    with open_file(rest) as file:
        if not _is_marked(file):
            raise ValueError(f"`{rest}` is damaged: the mark at its end, of checksums, is not there. {ADVICE}")
        _validate_file(file, rest, share, shares)


def _is_marked(file: IO[bytes]) -> bool:
    if file.seek(0, io.SEEK_END) < len(MARK):
        return False
    file.seek(-len(MARK), io.SEEK_END)
    return file.read() == MARK


def _validate_file(file: IO[bytes], path: PathLike, share: int, shares: int) -> None:
    name = os.fspath(path)
    with _zip_errors(f"`{name}` is damaged: it has flipped bits in its list of contents. {ADVICE}"):
        archive = zipfile.ZipFile(file)
    with archive:
        for number, record in enumerate(sorted(archive.infolist(), key=is_of_tensor)):
            if is_of_tensor(record) and number % shares != share:
                continue
            if not _is_whole(archive, record):
                key = key_of_record(file, record.filename) if is_of_tensor(record) else None
                what = record.filename if key is None else key
                raise ValueError(f"`{name}` is damaged: the checksum of `{what}` does not match its bytes. {ADVICE}")


def is_of_tensor(record: zipfile.ZipInfo) -> bool:
    """Whether a record holds the numbers of a tensor."""
    return "/data/" in record.filename


def _is_whole(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    """Whether the bytes of a record have its sum; `zipfile` compares them at the end."""
    size = 0
    try:
        with archive.open(record) as data:
            while chunk := data.read(_CHUNK):
                size += len(chunk)
    except Exception as error:  # a flipped bit in what is said about the record has all kinds of consequences
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        return False
    return size == record.file_size


@contextmanager
def _zip_errors(text: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(text) from error


def _validate_folder(folder: str, weights_only: bool, share: int, shares: int) -> None:
    with open_file(_inside(folder, MARKER)) as file:
        written = file.read()
    metadata = written[: -len(sum_of(b""))]
    if not written[len(metadata) :].startswith(MARK):
        return
    if written != metadata + sum_of(metadata):
        raise ValueError(f"`{folder}` is damaged: the checksum of its `{MARKER}` does not match its bytes. {ADVICE}")
    _validate_parts(folder, weights_only, share, shares)


def _validate_parts(folder: str, weights_only: bool, share: int, shares: int) -> None:
    from fabric.checkpoint.folder import dcp  # as slow to import as torch

    metadata = dcp.open_metadata(folder, weights_only)
    items = metadata.state_dict_metadata
    places = sorted(metadata.storage_data.items(), key=lambda entry: (entry[1].relative_path, entry[1].offset))
    for number, (index, place) in enumerate(places):
        if dcp.is_tensor(items.get(index.fqn)) and number % shares != share:
            continue
        with open_file(_inside(folder, place.relative_path)) as file:
            if not _is_whole_archive(Slice(file, place.offset, place.length)):
                raise ValueError(
                    f"`{_inside(folder, place.relative_path)}` is damaged: the checksum of `{index.fqn}` does not match"
                    f" its bytes. {ADVICE}"
                )


def _inside(folder: str, name: str) -> str:
    local = local_path(folder)
    return f"{folder.rstrip('/')}/{name}" if local is None else os.path.join(local, name)


def _is_whole_archive(part: io.RawIOBase) -> bool:
    text = "a part is no archive"
    try:
        with _zip_errors(text):
            archive = zipfile.ZipFile(io.BufferedReader(part))
    except ValueError:
        return False
    with archive:
        return all(_is_whole(archive, record) for record in archive.infolist())


class Slice(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to another place in the part."""
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        """Read no further than to the end of the part."""
        size = min(len(buffer), max(0, self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(size)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
