# SPDX-License-Identifier: Apache-2.0
"""File systems behind a path or URL."""

import os
import re
from typing import TYPE_CHECKING, Any

from fabric.utilities.types import PathLike

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(://|::)")  # two letters at least: `C:\` is a drive


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
    """The file system of a path or URL, and the path inside it."""
    from fsspec.core import url_to_fs  # imported when first used: see design "Light"

    try:
        filesystem, inner = url_to_fs(os.fspath(path), **kwargs)
    except ValueError as error:
        raise ValueError(
            f"`{os.fspath(path)}` has a protocol that fsspec does not know ({error})."
            " Write a local path, or a URL of a file system whose package is installed."
        ) from error
    except ImportError as error:
        raise ModuleNotFoundError(f"`{os.fspath(path)}` needs a package of its file system: {error}") from error
    return filesystem, inner


def local_path(path: PathLike) -> str | None:
    """The plain path of a local file, for a path or a `file://` URL; None for everything else."""
    text = os.fspath(path)
    if not _URL.match(text):
        return text
    for prefix in ("file://", "local://"):
        if text.startswith(prefix):
            return text[len(prefix) :]
    return None
