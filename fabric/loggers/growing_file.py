# SPDX-License-Identifier: Apache-2.0
"""Text files that grow: at once on a local disk, in steps at a URL whose store can only write whole objects."""

import os
import time
from abc import ABC, abstractmethod

from typing_extensions import override

from fabric.utilities.cloud_io import split_url


class GrowingFile(ABC):
    """A text file that is appended to, and now and then replaced as a whole."""

    @abstractmethod
    def read(self) -> str:
        """All of the text; empty where there is no file."""

    @abstractmethod
    def append(self, text: str) -> None:
        """Add text at the end."""

    @abstractmethod
    def replace(self, text: str) -> None:
        """Put text in place of everything. A reader sees the old or the new text, never a part of either."""

    @abstractmethod
    def flush(self) -> None:
        """Write out what is held back."""


class LocalFile(GrowingFile):
    """On a local disk. Nothing is ever held back: what was appended outlives the process, however that ends."""

    def __init__(self, path: str) -> None:
        self._path = path

    @override
    def read(self) -> str:
        try:
            with open(self._path, encoding="utf-8", newline="") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    @override
    def append(self, text: str) -> None:
        with open(self._path, "a", encoding="utf-8", newline="") as file:
            file.write(text)

    @override
    def replace(self, text: str) -> None:
        beside = f"{self._path}.{os.getpid()}.tmp"
        with open(beside, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)

    @override
    def flush(self) -> None:
        pass


class RemoteFile(GrowingFile):
    """At an fsspec URL. Appended text is held until enough of it has come or some seconds have passed.

    Args:
        url: Where it is.
        every_n: Write it out at the latest after so many calls of `append`.
        every_seconds: And at the first `append` that comes so many seconds after the last write.
    """

    def __init__(self, url: str, *, every_n: int, every_seconds: float = 10.0) -> None:
        self._filesystem, self._path = split_url(url)
        self._every_n = every_n
        self._every_seconds = every_seconds
        self._parts = [self._fetch()]
        self._held = 0
        self._written_at = time.monotonic()
        self._pid = os.getpid()

    @override
    def read(self) -> str:
        return "".join(self._parts)

    @override
    def append(self, text: str) -> None:
        self._parts.append(text)
        self._held += 1
        if self._held >= self._every_n or time.monotonic() - self._written_at >= self._every_seconds:
            self.flush()

    @override
    def replace(self, text: str) -> None:
        self._parts = [text]
        self._held += 1
        self.flush()

    @override
    def flush(self) -> None:
        # A forked child has a copy of what is held; only the process that took it in writes it.
        if self._held == 0 or os.getpid() != self._pid:
            return
        with self._filesystem.open(self._path, "w", encoding="utf-8", newline="") as file:
            file.write(self.read())
        self._held = 0
        self._written_at = time.monotonic()

    def _fetch(self) -> str:
        try:
            with self._filesystem.open(self._path, "r", encoding="utf-8", newline="") as file:
                return str(file.read())
        except FileNotFoundError:
            return ""
