# SPDX-License-Identifier: Apache-2.0
"""File systems behind a path or URL."""

import errno
import os
import re
import stat
from typing import IO, TYPE_CHECKING, Any

from fabric.utilities.imports import require_extra
from fabric.utilities.types import PathLike

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(://|::)")  # two letters at least: `C:\` is a drive
_S3 = ("s3", "s3a")


def get_filesystem(path: PathLike, **kwargs: Any) -> "AbstractFileSystem":
    """The fsspec file system that serves a path or URL.

    Args:
        path: A local path, or a URL such as `s3://bucket/run`, `memory://run`, `file:///tmp/run`.
        **kwargs: Options of that file system.

    Raises:
        ValueError: If no file system has that protocol, with what to type.
        ModuleNotFoundError: If its package is not installed.
    """
    return split_url(path, **kwargs)[0]


def split_url(path: PathLike, **kwargs: Any) -> tuple["AbstractFileSystem", str]:
    """The file system of a path or URL, and the path inside it. It looks anew: other processes write there too."""
    from fsspec.core import url_to_fs  # imported when first used: see design "Light"

    try:
        filesystem, inner = url_to_fs(os.fspath(path), **kwargs)
    except ValueError as error:
        raise ValueError(
            f"`{os.fspath(path)}` has a protocol that fsspec does not know ({error})."
            " Write a local path, or a URL of a file system whose package is installed."
        ) from error
    except ImportError as error:
        if os.fspath(path).startswith(tuple(f"{protocol}://" for protocol in _S3)):
            require_extra(os.fspath(path), extra="s3", requirement="s3fs")
        raise ModuleNotFoundError(f"`{os.fspath(path)}` needs a package of its file system: {error}") from error
    filesystem.invalidate_cache()
    return filesystem, inner


def open_remote(path: PathLike) -> IO[bytes]:
    """A file behind a URL, open for reading.

    Raises:
        IsADirectoryError: If it is a folder, which some file systems would open as an empty file.
        OSError: If it can't be read.
    """
    filesystem, inner = split_url(path)
    if is_object_store(filesystem) and not filesystem.isfile(inner) and filesystem.isdir(inner):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    file: IO[bytes] = filesystem.open(inner, "rb")
    return file


def is_from_client(error: Exception) -> bool:
    """Whether it is the network's or a login's, of a kind that is no `OSError`, and not one of a program's mistakes."""
    return type(error).__module__.partition(".")[0] in ("botocore", "aiobotocore", "aiohttp")


def is_object_store(filesystem: "AbstractFileSystem") -> bool:
    """Whether a file is there once its upload is complete, and not before, and folders need not be made."""
    protocol = filesystem.protocol
    return any(name in _S3 for name in ((protocol,) if isinstance(protocol, str) else protocol))


def validate_is_file(path: str) -> None:
    """Raise if a local path is that of a pipe, a device or a socket: who reads it may wait for ever.

    Raises:
        ValueError: If it is so. What is not there is for the reader to say.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"`{path}` is a pipe, a device or a socket, and no file. Name a file or folder.")


def local_path(path: PathLike) -> str | None:
    """The plain path of a local file, for a path or a `file://` URL; None for everything else."""
    text = os.fspath(path)
    if not _URL.match(text):
        return text
    for prefix in ("file://", "local://"):
        if text.startswith(prefix):
            return text[len(prefix) :]
    return None
