# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as single `torch.save` files."""

import os
import pickle
import zipfile
from typing import Any

import torch
from typing_extensions import override

from fabric.plugins.io.checkpoint_io import CheckpointIO
from fabric.plugins.io.contents import in_short, records_of, validate_nesting
from fabric.plugins.io.refused import find_refused
from fabric.plugins.io.whole_file import first_errors, os_errors_name, replacing_file
from fabric.utilities.cloud_io import local_path, open_remote, split_url, validate_is_file
from fabric.utilities.types import PathLike


class TorchCheckpointIO(CheckpointIO):
    """One file, as `torch.save` writes it, at a local path or any URL that fsspec knows.

    It is written beside its place, synced, and then renamed, so that a kill at any moment leaves the old file or the
    new one. Reading refuses pickled objects unless it is told to trust the file.

    Example:
        >>> io = TorchCheckpointIO()
        >>> io.save_checkpoint({"step": 3}, "memory://run/step-3.pt")
        >>> io.load_checkpoint("memory://run/step-3.pt")
        {'step': 3}
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        with replacing_file(path, storage_options or {}) as file:
            write_archive(checkpoint, file)

    @override
    def load_checkpoint(self, path: PathLike, map_location: Any = None, weights_only: bool = True) -> Any:
        with os_errors_name(path):
            local = local_path(path)
            if local is not None:
                validate_is_file(local)
                return _load(local, path, map_location, weights_only)
            with open_remote(path) as file:
                return _load(file, path, map_location, weights_only)

    @override
    def map_checkpoint(self, path: PathLike, weights_only: bool = True) -> Any:
        local = local_path(path)
        if local is None or not os.path.isfile(local) or not zipfile.is_zipfile(local):  # of before PyTorch 1.6
            return self.load_checkpoint(path, map_location="cpu", weights_only=weights_only)
        with os_errors_name(path):
            return _load(local, path, "cpu", weights_only, mmap=True)

    @override
    def remove_checkpoint(self, path: PathLike) -> None:
        with os_errors_name(path):
            local = local_path(path)
            if local is not None:
                os.remove(local)
                return
            filesystem, inner = split_url(path)
            filesystem.rm(inner)


def write_archive(checkpoint: Any, file: Any) -> None:
    """`torch.save` into an open file, with the error itself where writing fails."""
    with first_errors():
        torch.save(checkpoint, file)


def _load(source: Any, path: PathLike, map_location: Any, weights_only: bool, mmap: bool = False) -> Any:
    try:
        records_of(source)
        content = torch.load(source, map_location=map_location, weights_only=weights_only, mmap=mmap)
        validate_nesting(content)
        return content
    except OSError:
        raise
    except Exception as error:
        if weights_only is not False and isinstance(error, pickle.UnpicklingError):
            _raise_if_refused(source, path, error)
        raise ValueError(
            f"`{os.fspath(path)}` can't be read as a checkpoint. It is damaged or incomplete, or it was not written by"
            f" `fabric.save` or `torch.save` ({in_short(error)})."
        ) from error


def _raise_if_refused(source: Any, path: PathLike, error: Exception) -> None:
    refused = find_refused(source)
    if refused is None:
        return
    name = refused.type.rpartition(".")[2]
    raise pickle.UnpicklingError(
        f"`{os.fspath(path)}` holds an object under `{refused.key}` that needs `{refused.type}`, and that is not loaded"
        " by default, since unpickling it can run code. If you trust the file, pass `weights_only=False`, or allow the"
        f" type alone with `torch.serialization.add_safe_globals([{name}])`."
    ) from error
