# SPDX-License-Identifier: Apache-2.0
"""Locks on files: who reads a checkpoint keeps it from being removed. The system lets go of them with the process."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from fabric.checkpoint.folder.marker import MARKER
from fabric.checkpoint.weights.places import markers_in
from fabric.plugins.io.whole_file import unlock
from fabric.utilities.cloud_io import local_path
from fabric.utilities.types import PathLike

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for somebody at its other end


@contextmanager
def reading(path: str) -> Iterator[bool]:
    """Inside, `being_read` is True elsewhere for this file; the value is whether the file is there.

    Where the file system has no locks, `being_read` is always False.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _lock(descriptor, exclusive=False) is not False and _is_at(descriptor, path)
    finally:
        unlock(descriptor)
        os.close(descriptor)


def locked_file(path: str) -> str:
    """The file of a checkpoint that is locked while it is read, and that makes it complete."""
    if not os.path.isdir(path):
        return path
    marker = os.path.join(path, MARKER)
    others = [] if os.path.exists(marker) else markers_in(path)
    return os.path.join(path, others[0]) if others else marker


@contextmanager
def keeping(path: PathLike, wanted: bool = True) -> Iterator[None]:
    """`reading`, where `wanted`, for a checkpoint at any path; what is wrong with that is for the reader to say."""
    with ExitStack() as stack:
        with suppress(OSError):
            local = local_path(path) if wanted else None
            if local is not None:
                stack.enter_context(reading(locked_file(local)))
        yield


@contextmanager
def being_read(path: str) -> Iterator[bool]:
    """Whether somebody is `reading` the file. If not, nobody begins inside."""
    try:
        # Network file systems want write access for this lock.
        descriptor = os.open(path, (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | _AT_ONCE)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _lock(descriptor, exclusive=True) is False
    finally:
        unlock(descriptor)
        os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, *, exclusive: bool) -> bool | None:
    """Whether this process now holds the file; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
