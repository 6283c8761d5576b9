# SPDX-License-Identifier: Apache-2.0
"""A file in the place of a folder, or the other way round, with no moment at which neither is there."""

import ctypes
import os
import re
import shutil
import sys
from contextlib import suppress

from fabric.plugins.io.whole_file import remove_stale


def swap(new: str, target: str) -> None:
    """Put a file where a folder is, or the other way round, and remove what was there."""
    old = new
    if not _exchange(new, target):
        # Between these two steps both, whole, are there under hidden names.
        old = f"{new}.old"
        os.rename(target, old)
        os.rename(new, target)
    remove_entry(old)
    remove_hidden(target)


def remove_hidden(target: str) -> None:
    """Remove what saves to the same place that were killed left beside it, once the place is taken by a whole one."""
    parent, name = os.path.split(target)
    hidden = re.compile(rf"[.]{{1,2}}{re.escape(name[:60])}[.][0-9a-f]{{8}}[.]tmp([.][0-9a-f]{{8}}[.]tmp|[.]old)?")
    for entry in filter(hidden.fullmatch, os.listdir(parent)):
        path = os.path.join(parent, entry)
        remove_stale(path) if os.path.isfile(path) else remove_entry(path)


def _exchange(new: str, target: str) -> bool:
    """Whether the two have changed places in one step: Linux can do that, on most of its file systems."""
    call = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    at_working_directory, exchange = -100, 2
    names = os.fsencode(new), os.fsencode(target)
    return call is not None and call(at_working_directory, names[0], at_working_directory, names[1], exchange) == 0


def remove_entry(path: str) -> None:
    """Remove a local file or folder, if it can be removed."""
    with suppress(OSError):
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
