# SPDX-License-Identifier: Apache-2.0
"""Files that are never half: written beside their place and then renamed."""

import errno
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from fabric.utilities.cloud_io import is_from_client, is_object_store, local_path, split_url
from fabric.utilities.types import PathLike

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Remote file systems raise the right class without its number.
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}


@contextmanager
def replacing_file(path: PathLike, storage_options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    """A new file, open for writing, that takes the place of `path` when the block ends without an error.

    Args:
        path: A local path or a URL that fsspec knows. Missing folders are made.
        storage_options: Options of the remote file system.

    Raises:
        OSError: Of the kind that went wrong, naming `path`.
    """
    local = local_path(path)
    with os_errors_name(path):
        if local is None:
            with _replacing_remote(path, storage_options) as file:
                yield file
            return
        target = os.path.realpath(local)  # the file behind a symbolic link is replaced, not the link
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if os.path.exists(target) and not stat.S_ISREG(os.stat(target).st_mode):
            with open(target, "wb") as file:  # a device or a pipe is written to, never replaced
                yield file
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with _replacing_local(target) as file:
            yield file


@contextmanager
def os_errors_name(path: PathLike) -> Iterator[None]:
    """An `OSError` inside names `path`: those of `write` name nothing, and others a temporary file."""
    try:
        yield
    except OSError as error:
        number = error.errno or _NUMBERS.get(type(error))
        if number is None:
            raise OSError(f"`{os.fspath(path)}`: {error}") from error
        raise OSError(number, _description(error, number, path), os.fspath(path)) from error  # the matching subclass
    except Exception as error:
        if not is_from_client(error):
            raise
        raise OSError(f"`{os.fspath(path)}`: {error}") from error


@contextmanager
def first_errors() -> Iterator[None]:
    """The error of a write itself: after it PyTorch still closes the archive, and complains what is missing in that."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _description(error: OSError, number: int, path: PathLike) -> str:
    """What the system calls it, and what a remote one says beyond that."""
    text = os.strerror(number)
    said = error.strerror or str(error)
    if local_path(path) is not None or said == text or "://" in said or said in os.fspath(path):
        return text
    return said if said.startswith(text) else f"{text} ({said.strip().rstrip('.')})"


@contextmanager
def _replacing_local(target: str) -> Iterator[IO[bytes]]:
    directory, name = os.path.split(target)
    prefix = f".{name[:60]}."
    _remove_all_stale(directory, prefix)
    temporary = os.path.join(directory, f"{prefix}{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb") as file:
            _lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows does not rename an open file
            os.replace(temporary, target)
            if not file.closed:
                unlock(file.fileno())
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise
    sync_directory(directory)


def _lock(descriptor: int) -> bool:
    """Whether this process now holds the file. The system lets go of it when the process ends, however it ends."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another process, or a file system without locks
        return False
    return True


def unlock(descriptor: int) -> None:
    """Let go of a lock, also for children that were forked meanwhile: they have the file open as long as they run."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _remove_all_stale(directory: str, prefix: str) -> None:
    """Remove what saves to the same place left when they were killed, and nothing that is still being written."""
    for name in os.listdir(directory):
        if name.startswith(prefix) and name.endswith(".tmp"):
            remove_stale(os.path.join(directory, name))


def remove_stale(path: str) -> None:
    """Remove a temporary file that `replacing_file` made, unless it is still being written."""
    with suppress(OSError), open(path, "rb") as file:
        if _lock(file.fileno()):
            os.remove(path)


def sync_directory(directory: str) -> None:
    """Make the rename itself survive a power cut."""
    with suppress(OSError):  # some systems can't open or sync a directory
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _replacing_remote(path: PathLike, storage_options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    filesystem, target = split_url(path, **storage_options)
    if filesystem.isdir(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if is_object_store(filesystem):
        with _uploading(filesystem, target) as file:
            yield file
        return
    parent = filesystem._parent(target)
    if parent and not filesystem.exists(parent):
        filesystem.makedirs(parent, exist_ok=True)
    temporary = f"{target}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with filesystem.open(temporary, "wb") as file:
            yield file
        filesystem.mv(temporary, target)
    except BaseException:
        with suppress(Exception):
            filesystem.rm(temporary)
        raise


@contextmanager
def _uploading(filesystem: "AbstractFileSystem", target: str) -> Iterator[IO[bytes]]:
    """No temporary object, which a kill would leave: the old one is there until the upload is complete."""
    file = filesystem.open(target, "wb")
    try:
        yield file
        file.close()
    except BaseException:
        with suppress(Exception):
            file.discard()
        file.closed = True  # closing it would complete the upload
        raise
