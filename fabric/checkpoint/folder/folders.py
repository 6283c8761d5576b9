# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as folders, to which each rank writes its own part.

The data of each save goes into a new folder inside, and the file `.metadata`, which says what lies where, is replaced
at the very end, in one step. So a kill at any moment leaves the old checkpoint or the new one, whole, on file systems
without a rename too. What is left of a save that was killed is removed by the next one that writes a
folder.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from fabric.checkpoint.access import Attempts, Ranks
from fabric.checkpoint.files.swap import remove_entry, remove_hidden, swap
from fabric.checkpoint.folder.marker import MARKER, is_committed, is_folder
from fabric.checkpoint.state.flatten import Path
from fabric.checkpoint.weights.places import is_own_folder, remove_object, remove_own
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.plugins.io.whole_file import os_errors_name
from fabric.utilities.cloud_io import local_path, open_remote, split_url
from fabric.utilities.types import PathLike

_DATA_FOLDER = re.compile(r"data-[0-9a-f]{8}")
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")  # as PyTorch writes them, beside the marker


def save_folder(
    path: PathLike, flat: Mapping[Path, Any], access: Ranks, attempts: Attempts, checksum: bool = False
) -> None:
    """Write the items of all ranks to a folder. Collective.

    Args:
        path: A local path or URL; the same on all ranks. A checkpoint that is there, a file or a folder, is replaced
            when the new one is complete.
        flat: This rank's items; those that it shares with others once.
        access: The strategy, or how to reach the other ranks.
        attempts: Where errors are kept; all ranks raise the first one.
        checksum: Whether readers shall check the sums of the parts.
    """
    from fabric.checkpoint.folder import dcp  # as slow to import as torch

    plan: tuple[str, str, bool] | None = None
    with attempts:
        if access.is_global_zero:
            with os_errors_name(path):
                plan = _place_for(path)
    plan = access.broadcast(plan)
    attempts.agree(access)
    assert plan is not None
    folder, data, is_new = plan
    with attempts, os_errors_name(path):
        dcp.write(folder, data, flat, access, checksum)
    failed = attempts.error is not None  # on all ranks, or on none: PyTorch's own collectives see to it
    with attempts:
        if access.is_global_zero and failed:
            _remove_failed(folder, data, is_new)
        elif access.is_global_zero:
            with os_errors_name(path):
                _finish(folder, data, path)
    attempts.agree(access)


@contextmanager
def replacing_folder(path: PathLike, io: CheckpointIO) -> Iterator[PathLike]:
    """Where to write a file that shall stand at `path`: beside it, while a local folder's checkpoint is there.

    The folder goes when the file is complete.
    """
    local = local_path(path)
    if local is None or not isinstance(io, TorchCheckpointIO) or not _is_checkpoint(local):
        yield path
        if local is not None and isinstance(io, TorchCheckpointIO) and os.path.isfile(local):
            remove_hidden(os.path.realpath(local))
        return
    folder = os.path.realpath(local)
    parent, name = os.path.split(folder)
    beside = os.path.join(parent, f".{name[:60]}.{uuid.uuid4().hex[:8]}.tmp")
    with os_errors_name(path):
        yield beside
        swap(beside, folder)


def _place_for(path: PathLike) -> tuple[str, str, bool]:
    """The folder to write to, the folder inside it for the data, and whether the first one is new."""
    data = f"data-{uuid.uuid4().hex[:8]}"
    local = local_path(path)
    if local is None:
        return os.fspath(path).rstrip("/"), data, not is_folder(path)
    folder = os.path.realpath(local)
    if os.path.isfile(folder):  # it stays until the folder that takes its place is complete
        parent, name = os.path.split(folder)
        return os.path.join(parent, f".{name[:60]}.{data[5:]}.tmp"), data, True
    is_new = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    return folder, data, is_new


def _is_checkpoint(folder: str) -> bool:
    """Whether a local folder is a whole checkpoint, of either layout."""
    return is_committed(folder) or is_own_folder(folder)


def _finish(folder: str, data: str, path: PathLike) -> None:
    """Runs on rank 0 when the new checkpoint is complete."""
    local = local_path(path)
    if local is None:
        _remove_old_remote(path, data)
        remove_own(os.fspath(path))
        return
    target = os.path.realpath(local)
    if folder != target:
        swap(folder, target)
        return
    for name in os.listdir(folder):
        if _is_old(name, data):
            remove_entry(os.path.join(folder, name))
    remove_own(folder)
    remove_hidden(folder)


def _is_old(name: str, data: str) -> bool:
    """Whether only the replaced metadata refers to it, or a save that was killed left it."""
    return _DATA_FILE.fullmatch(name) is not None or (_DATA_FOLDER.fullmatch(name) is not None and name != data)


def _remove_old_remote(path: PathLike, data: str) -> None:
    remove_object(os.fspath(path).rstrip("/"))
    filesystem, inner = split_url(path)
    for entry in filesystem.ls(inner, detail=False):
        name = entry.rstrip("/").rpartition("/")[2]
        if _is_old(name, data):
            with suppress(OSError):
                filesystem.rm(entry, recursive=True)


def _remove_failed(folder: str, data: str, is_new: bool) -> None:
    with suppress(OSError):
        if is_committed(folder) and _refers_to(folder, data):
            return  # a rank was lost after the last step, and what was written counts
        if local_path(folder) is None:
            filesystem, inner = split_url(folder)
            filesystem.rm(f"{inner}/{data}", recursive=True)
            return
        shutil.rmtree(os.path.join(folder, data), ignore_errors=True)
        if is_new:
            os.rmdir(folder)


def _refers_to(folder: str, data: str) -> bool:
    """Whether the marker is that of the save with this data."""
    local = local_path(folder)
    with open_remote(f"{folder}/{MARKER}") if local is None else open(os.path.join(local, MARKER), "rb") as file:
        return data.encode() in file.read()
