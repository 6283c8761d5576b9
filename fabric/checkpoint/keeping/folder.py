# SPDX-License-Identifier: Apache-2.0
"""The folder in which checkpoints lie, on a local disk or behind a URL."""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from typing_extensions import override

from fabric.checkpoint.folder.marker import MARKER
from fabric.checkpoint.locks import being_read, locked_file, reading
from fabric.checkpoint.weights.places import markers_in
from fabric.plugins.io.whole_file import os_errors_name, replacing_file
from fabric.utilities.cloud_io import is_object_store, local_path, split_url, validate_is_file

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def open_folder(path: str) -> "Folder":
    """The folder at a local path or a URL; it need not exist yet."""
    local = local_path(path)
    return _LocalFolder(path, local) if local is not None else _RemoteFolder(path)


class Folder(ABC):
    """What is done to checkpoints, by the names of their files or folders.

    Args:
        path: A local path or a URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def path_of(self, name: str) -> str:
        """The full path or URL of an entry."""
        return f"{self.path.rstrip('/')}/{name}"

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, whole or not at all."""
        with replacing_file(self.path_of(name), {}) as file:
            file.write(content)

    @abstractmethod
    def names(self) -> list[str]:
        """All entries; none where there is no folder."""

    @abstractmethod
    def is_committed(self, name: str) -> bool:
        """Whether a checkpoint is complete: a file (which is renamed into place), or a folder with its marker.

        The marker is that of the sharded layout, or of weights as safetensors.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a small file."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Remove an entry, if there is one, unless somebody reads it; returns whether it is gone."""

    @abstractmethod
    @contextmanager
    def reading(self, name: str) -> Iterator[bool]:
        """Inside, nobody who asks `remove` takes the checkpoint away; the value is whether it is still there."""


class _LocalFolder(Folder):
    def __init__(self, path: str, local: str) -> None:
        super().__init__(path)
        self._local = local

    @override
    def path_of(self, name: str) -> str:
        return os.path.join(self._local, name)

    @override
    def names(self) -> list[str]:
        try:
            return os.listdir(self._local)
        except FileNotFoundError:
            return []

    @override
    def is_committed(self, name: str) -> bool:
        return os.path.isfile(self._marker(name))

    @override
    def read(self, name: str) -> bytes:
        validate_is_file(self.path_of(name))
        with open(self.path_of(name), "rb") as file:
            return file.read()

    @override
    def remove(self, name: str) -> bool:
        path = self.path_of(name)
        marker = self._marker(name)
        with being_read(marker) as read:
            if read:
                return False
            for first in (marker, *(os.path.join(path, other) for other in markers_in(path))):
                with suppress(FileNotFoundError):
                    os.remove(first)  # first: from here on it is no checkpoint any more
            if os.path.isdir(path):
                shutil.rmtree(path)
        return True

    @override
    @contextmanager
    def reading(self, name: str) -> Iterator[bool]:
        with reading(self._marker(name)) as there:
            yield there

    def _marker(self, name: str) -> str:
        return locked_file(self.path_of(name))


class _RemoteFolder(Folder):
    """No locks here: a checkpoint may be removed while another process reads it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        split_url(path)  # raises if it can't be

    @property
    def _files(self) -> "AbstractFileSystem":
        return split_url(self.path)[0]  # each time: it sees what other processes wrote since

    @property
    def _inner(self) -> str:
        return split_url(self.path)[1]

    @override
    def names(self) -> list[str]:
        files = self._files
        with os_errors_name(self.path):
            try:
                entries = files.ls(self._inner, detail=False)
            except FileNotFoundError:
                if is_object_store(files) and not files.exists(self._inner.partition("/")[0]):
                    raise  # no bucket
                return []
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]

    @override
    def is_committed(self, name: str) -> bool:
        inner = self._inside(name)
        return bool(self._files.isfile(inner) or self._files.isfile(f"{inner}/{MARKER}") or self._markers(name))

    @override
    def read(self, name: str) -> bytes:
        content: bytes = self._files.cat_file(self._inside(name))
        return content

    @override
    def remove(self, name: str) -> bool:
        inner = self._inside(name)
        for marker in (MARKER, *self._markers(name)):
            with suppress(FileNotFoundError, NotADirectoryError):
                self._files.rm_file(f"{inner}/{marker}")
        with suppress(FileNotFoundError):
            self._files.rm(inner, recursive=True)
        return True

    @override
    @contextmanager
    def reading(self, name: str) -> Iterator[bool]:
        yield self.is_committed(name)

    def _markers(self, name: str) -> list[str]:
        return markers_in(self.path_of(name))

    def _inside(self, name: str) -> str:
        return f"{self._inner.rstrip('/')}/{name}"
