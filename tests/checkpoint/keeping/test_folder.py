# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints on a disk and behind a URL, and who holds a lock."""

import os
import uuid
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from fabric.checkpoint.keeping.folder import Folder, open_folder
from fabric.checkpoint.locks import _is_at, being_read, reading
from tests.ranks import RankContext, run_ranks


@pytest.fixture(params=["local", "file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    paths = {"local": f"{tmp_path}/run", "file": f"file://{tmp_path}/run", "memory": f"memory://{uuid.uuid4().hex}/run"}
    return open_folder(paths[request.param])


def test_what_is_a_complete_checkpoint(folder: Folder) -> None:
    assert folder.names() == []
    assert not folder.is_committed("file")
    folder.write("file", b"content")
    folder.write("folder/data-1/part", b"content")
    assert sorted(folder.names()) == ["file", "folder"]
    assert folder.is_committed("file")
    assert not folder.is_committed("folder")
    folder.write("folder/.metadata", b"content")
    assert folder.is_committed("folder")
    assert folder.read("file") == b"content"


def test_removing(folder: Folder) -> None:
    folder.write("file", b"content")
    folder.write("folder/data-1/part", b"content")
    folder.write("folder/.metadata", b"content")
    folder.write("unfinished/data-1/part", b"content")
    assert all(folder.remove(name) for name in ("file", "folder", "unfinished", "missing"))
    assert folder.names() == []


def test_a_checkpoint_is_there_while_it_is_read(folder: Folder) -> None:
    folder.write("file", b"content")
    with folder.reading("file") as there, folder.reading("missing") as not_there:
        assert (there, not_there) == (True, False)


@pytest.mark.parametrize("marker", ["name", "name/.metadata"])
def test_what_is_read_is_not_removed(tmp_path: Path, marker: str) -> None:
    folder = open_folder(os.fspath(tmp_path))
    folder.write(marker, b"content")
    with folder.reading("name"), folder.reading("name"):
        assert not folder.remove("name")
        assert folder.is_committed("name")
    assert folder.remove("name")
    assert not folder.is_committed("name")


def _remove_what_rank_1_reads(context: RankContext, directory: Path, marker: str) -> list[bool]:
    context.process_group()
    folder = open_folder(os.fspath(directory))
    if context.rank == 0:
        folder.write(marker, b"content")
    dist.barrier()
    with folder.reading("name") if context.rank == 1 else nullcontext(True) as there:
        dist.barrier()
        removed = folder.remove("name") if context.rank == 0 else not there
        dist.barrier()
    dist.barrier()
    return [removed, folder.remove("name") if context.rank == 0 else True]


@pytest.mark.ranks
@pytest.mark.parametrize("marker", ["name", "name/.metadata"])
def test_what_another_process_reads_is_not_removed(tmp_path: Path, marker: str) -> None:
    assert run_ranks(2, _remove_what_rank_1_reads, tmp_path, marker) == [[False, True]] * 2


def test_what_is_being_removed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    with being_read(str(path)) as read:
        assert not read
        with reading(str(path)) as there:
            assert not there


def test_a_file_that_was_replaced_since_it_was_opened_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with path.open() as file:
        assert _is_at(file.fileno(), str(path))
        (tmp_path / "new").write_text("new")
        (tmp_path / "new").rename(path)
        assert not _is_at(file.fileno(), str(path))
        path.unlink()
        assert not _is_at(file.fileno(), str(path))


def test_a_read_only_file_is_locked_too(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    path.chmod(0o444)
    with reading(str(path)), being_read(str(path)) as read:
        assert read
