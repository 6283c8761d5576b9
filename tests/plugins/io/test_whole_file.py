# SPDX-License-Identifier: Apache-2.0
import os
import re
import resource
import stat
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from fabric.plugins.io import TorchCheckpointIO
from fabric.plugins.io.whole_file import replacing_file

io = TorchCheckpointIO()


class StoppedError(Exception):
    pass


def _stop_while_writing(path: str) -> None:
    with replacing_file(path, {}) as file:
        file.write(b"half")
        assert io.load_checkpoint(path) == {"step": 1}
        raise StoppedError


@pytest.mark.parametrize("prefix", ["", "memory://"])
def test_the_old_file_stays_when_writing_fails(prefix: str, tmp_path: Path) -> None:
    path = f"{prefix}{tmp_path}/a.pt"
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises(StoppedError):
        _stop_while_writing(path)
    assert io.load_checkpoint(path) == {"step": 1}
    filesystem = fsspec.core.url_to_fs(path)[0]
    assert [Path(name).name for name in filesystem.ls(str(tmp_path), detail=False)] == ["a.pt"]


def test_permissions_follow_the_umask_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "latest.pt"
    link.symlink_to(tmp_path / "real" / "a.pt")
    umask = os.umask(0o027)
    try:
        io.save_checkpoint({"step": 1}, link)
    finally:
        os.umask(umask)
    assert link.is_symlink()
    assert stat.S_IMODE((tmp_path / "real" / "a.pt").stat().st_mode) == 0o640
    assert os.listdir(tmp_path / "real") == ["a.pt"]


def test_everything_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        mode = os.fstat(descriptor).st_mode
        events.append("directory" if stat.S_ISDIR(mode) else ("file", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def record_replace(source: str, target: str) -> None:
        assert os.path.dirname(source) == os.path.dirname(target)
        events.append(("rename", os.path.getsize(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    io.save_checkpoint({"w": torch.zeros(1000)}, tmp_path / "a.pt")
    size = (tmp_path / "a.pt").stat().st_size
    assert events == [("file", size), ("rename", size), "directory"]


def test_what_a_killed_save_left_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    (tmp_path / ".a.pt.0123abcd.tmp").write_bytes(b"stale")
    (tmp_path / ".b.pt.0123abcd.tmp").write_bytes(b"of another checkpoint")
    with replacing_file(path, {}) as file:
        file.write(b"slow")
        io.save_checkpoint({"step": 2}, path)
        assert len(os.listdir(tmp_path)) == 3  # ours, the other checkpoint's, and the file
    assert path.read_bytes() == b"slow"
    assert sorted(os.listdir(tmp_path)) == [".b.pt.0123abcd.tmp", "a.pt"]


def test_a_full_disk_is_named() -> None:
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device: '/dev/full'$"):
        io.save_checkpoint({"w": torch.zeros(100_000)}, "/dev/full")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_disk_that_fills_up_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    io.save_checkpoint({"step": 1}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"^{re.escape(f'[Errno 27] File too large: {str(path)!r}')}$"):
            io.save_checkpoint({"w": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert io.load_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_places_that_can_not_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    through = file / "a.pt"
    with pytest.raises(OSError, match=re.escape(f"'{through}'")) as raised:
        io.save_checkpoint({}, through)
    assert isinstance(raised.value, FileExistsError | NotADirectoryError)
    with pytest.raises(IsADirectoryError, match=f"^{re.escape(f'[Errno 21] Is a directory: {str(tmp_path)!r}')}$"):
        io.save_checkpoint({}, tmp_path)
    fsspec.filesystem("memory").makedirs("/folder/inner", exist_ok=True)
    with pytest.raises(IsADirectoryError, match=re.escape("[Errno 21] Is a directory: 'memory://folder'")):
        io.save_checkpoint({}, "memory://folder")
    assert os.listdir(tmp_path) == ["file"]


def test_a_long_name(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250)
    io.save_checkpoint({"step": 1}, path)
    assert io.load_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a" * 250]
