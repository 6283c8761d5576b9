# SPDX-License-Identifier: Apache-2.0
"""Our side of `torch.distributed.checkpoint`: it plans, writes and reads; we say where, and when it counts.

Importing it costs as much as importing torch, so whoever needs this module imports it when it does.
"""

import dataclasses
import os
import pickle
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

# Not exported, but documented and the only way to write to a URL. `tests/checkpoint/test_folders.py` writes to one.
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from fabric.checkpoint.access import Ranks
from fabric.checkpoint.files.sums import sum_of, writing_sums
from fabric.checkpoint.folder.marker import MARKER, damaged_data
from fabric.checkpoint.folder.metadata import read_metadata, validate_sizes
from fabric.checkpoint.folder.ties import give_second_names, second_names, told
from fabric.checkpoint.state.flatten import Path, key_of
from fabric.checkpoint.state.later import Later
from fabric.plugins.io.contents import in_short, records_of, validate_nesting
from fabric.plugins.io.refused import find_refused
from fabric.plugins.io.whole_file import first_errors, replacing_file, sync_directory
from fabric.utilities.cloud_io import is_object_store, local_path, split_url


def write(folder: str, data: str, flat: Mapping[Path, Any], access: Ranks, checksum: bool = False) -> None:
    """Write the items of all ranks into `folder/data`, and at the end the marker that makes them the checkpoint.

    Args:
        folder: A local path or URL; the same on all ranks.
        data: The name of a new folder inside; the same on all ranks.
        flat: This rank's items by path.
        access: The strategy, or how to reach the other ranks.
        checksum: Whether readers shall check the sums of the parts.
    """
    writer = _LocalWriter(folder, data) if local_path(folder) is not None else _RemoteWriter(folder, data)
    if any(isinstance(value, Later) for value in flat.values()):
        writer.per_thread_copy_ahead = 0  # none is asked for before the former one is written
    writer.checksum = checksum
    writer.order = [key_of(path) for path in flat]
    with _own_errors(), writing_sums() if checksum else nullcontext():
        if access.world_size == 1:
            _write_alone(writer, _SavePlanner(flat))
            return
        save(
            {},  # the planner has them: PyTorch would ask each for a `state_dict`, and log that it did
            storage_writer=writer,
            planner=_SavePlanner(flat),
            process_group=access.checkpoint_group,
        )


def _write_alone(writer: FileSystemWriter, planner: DefaultSavePlanner) -> None:
    """What PyTorch's `save` does in one process; it would also warn, and to hide that is not safe in a thread."""
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    written = writer.write_data(plan, planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def read(
    folder: str, metadata: Metadata, wanted: dict[str, Tensor | None], weights_only: bool = True
) -> dict[str, Any]:
    """Read into tensors, plain or sharded, each rank for itself.

    Args:
        folder: A local path or URL.
        metadata: Its metadata, which was checked.
        wanted: A tensor for each key of one; None for a plain value.
        weights_only: Whether plain values that are pickled objects are refused.

    Returns:
        The plain values.
    """
    planner = _LoadPlanner(folder, weights_only)
    reader = (_LocalReader if local_path(folder) is not None else _RemoteReader)(local_path(folder) or folder)
    reader.known = metadata
    with _own_errors(), _quiet():
        try:
            load(dict(wanted), storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            first = error.failures[min(error.failures)][0]
            if first is planner.error or isinstance(first, OSError) or not isinstance(first, Exception):
                raise
            raise damaged_data(folder, in_short(first)) from first
    return planner.values


def open_metadata(folder: str, weights_only: bool = True) -> Metadata:
    """The metadata of a folder, checked in itself and against the sizes of the data files.

    Raises:
        ValueError: If it is damaged or incomplete.
        pickle.UnpicklingError: If it holds what is refused.
    """
    local = local_path(folder)
    if local is not None:
        with open(os.path.join(local, MARKER), "rb") as file:
            metadata = read_metadata(file, folder, weights_only)
        validate_sizes(metadata, folder, lambda name: _local_size(os.path.join(local, name)))
        return metadata
    filesystem, inner = split_url(folder)
    with filesystem.open(f"{inner}/{MARKER}", "rb") as file:
        metadata = read_metadata(file, folder, weights_only)
    sizes = filesystem.find(inner, detail=True)
    validate_sizes(metadata, folder, lambda name: sizes.get(f"{inner}/{name}", {}).get("size"))
    return metadata


def _local_size(path: str) -> int | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_tensor(item: Any) -> bool:
    """Whether an item of the metadata is a tensor, and not a plain value."""
    return isinstance(item, TensorStorageMetadata)


@contextmanager
def _quiet() -> Iterator[None]:
    """No words about one process. For all threads, so not in one that runs beside the loop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def _own_errors() -> Iterator[None]:
    """The error itself, where PyTorch wraps it in one that is not even an `Exception`.

    Of several ranks' errors it is the lowest one's, on all of them.
    """
    try:
        yield
    except CheckpointException as error:
        first = error.failures[min(error.failures)][0]
        if not isinstance(first, Exception):
            raise
        raise first from None


class _SavePlanner(DefaultSavePlanner):
    """Takes the items as they are: PyTorch's own flattening would lose empty dictionaries, and the types of keys."""

    def __init__(self, flat: Mapping[Path, Any]) -> None:
        super().__init__()
        self._flat = flat
        self._former: Tensor | None = None

    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        seconds = second_names(self._flat)
        own = {key_of(path): value for path, value in self._flat.items() if path not in seconds}
        self.state_dict = {key: value.stand_in() if isinstance(value, Later) else value for key, value in own.items()}
        self._later = {key: value for key, value in own.items() if isinstance(value, Later)}
        self.mappings: dict[str, Any] = {key_of(path): path for path in self._flat}
        self.mappings |= told({key_of(second): key_of(first) for second, first in seconds.items()})
        self.is_coordinator = is_coordinator

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        """PyTorch asks when it writes the item, one after the other, but keeps them all until it has done."""
        if self._former is not None:
            self._former.untyped_storage().resize_(0)
            self._former = None
        if index.fqn not in self._later:
            return super().lookup_object(index)
        item = self._later[index.fqn]
        tensor = item.read()
        self._former = tensor if item.is_fresh else None
        return tensor


class _Committing(FileSystemWriter):
    """Writes data into a new folder inside, so that what the present metadata refers to stays until the end."""

    folder: str
    data: str
    order: Sequence[str] = ()
    checksum = False

    @override
    def write_data(self, plan: Any, planner: Any) -> Any:
        """On each rank. What an error came from does not travel with it to the others."""
        with first_errors():
            return super().write_data(plan, planner)

    @override
    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Runs on rank 0 when all ranks have written and synced their data."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=self.folder, save_id=self.save_id)
        metadata.storage_data = {
            result.index: dataclasses.replace(
                result.storage_data, relative_path=f"{self.data}/{result.storage_data.relative_path}"
            )
            for results_of_rank in results
            for result in results_of_rank
        }
        give_second_names(metadata, self.order)
        if local_path(self.folder) is not None:
            sync_directory(os.path.join(self.folder, self.data))
        with replacing_file(os.path.join(self.folder, MARKER), {}) as file:
            written = pickle.dumps(metadata)
            file.write(written)
            if self.checksum:
                file.write(sum_of(written))


class _LocalWriter(_Committing):
    def __init__(self, folder: str, data: str) -> None:
        folder = local_path(folder) or folder
        super().__init__(os.path.join(folder, data))
        self.folder, self.data = folder, data


class _Files(FileSystem):
    """Where there are only objects, PyTorch would make a bucket, and complete the upload of a half-written file."""

    @override
    def mkdir(self, path: Any) -> None:
        assert self.fs is not None
        if not is_object_store(self.fs):
            super().mkdir(path)

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert self.fs is not None
        whole = mode == "wb" and is_object_store(self.fs)
        with replacing_file(path, {}) if whole else super().create_stream(path, mode) as stream:
            yield stream


class _RemoteWriter(FsspecWriter, _Committing):
    def __init__(self, folder: str, data: str) -> None:
        # Where nothing can be synced, PyTorch would sync all disks of the machine instead.
        super().__init__(f"{folder}/{data}", sync_files=False)
        self.fs = _Files()  # type: ignore[assignment]  # as PyTorch itself assigns it
        self.fs.init_path(self.path)
        self.folder, self.data = folder, data


class _Known:
    known: Metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """PyTorch's own reader unpickles whatever it finds."""
        return self.known


class _LocalReader(_Known, FileSystemReader):
    pass


class _RemoteReader(_Known, FsspecReader):
    pass


class _LoadPlanner(DefaultLoadPlanner):
    """Keeps plain values aside, and refuses pickled objects in them."""

    def __init__(self, folder: str, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values: dict[str, Any] = {}
        self.error: Exception | None = None
        self._folder = folder
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: Any, value: BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            records_of(value)
            self.values[key] = torch.load(value, map_location="cpu", weights_only=self._weights_only)
            validate_nesting(self.values[key])
        except pickle.UnpicklingError as error:
            refused = find_refused(value) if self._weights_only else None
            if refused is None:
                raise
            inner = "" if refused.key == "(the whole file)" else refused.key
            self.error = pickle.UnpicklingError(
                f"`{self._folder}` holds an object under `{key}{inner}` that needs `{refused.type}`, and that is not"
                " loaded by default, since unpickling it can run code. If you trust the folder, pass"
                " `weights_only=False`, or allow the type alone with"
                f" `torch.serialization.add_safe_globals([{refused.type.rpartition('.')[2]}])`."
            )
            raise self.error from error
