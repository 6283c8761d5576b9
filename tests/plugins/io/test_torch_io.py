# SPDX-License-Identifier: Apache-2.0
import argparse
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from fabric.plugins.io import CheckpointIO, TorchCheckpointIO

io = TorchCheckpointIO()


class Settings:
    ran = False

    def __init__(self, rate: float) -> None:
        self.rate = rate


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return _attack, ()


def _attack() -> str:
    Settings.ran = True
    return "done"


@pytest.mark.parametrize("url", ["{}/a/b/c.pt", "file://{}/c.pt", "memory://{}/c.pt"])
def test_a_file_comes_back(url: str, tmp_path: Path) -> None:
    path = url.format(tmp_path)
    for step in (1, 2):  # the second one replaces the first
        io.save_checkpoint({"w": torch.full((3,), step), "step": step}, path)
        content = io.load_checkpoint(path)
        assert content["step"] == step
        assert torch.equal(content["w"], torch.full((3,), step))
    folder = path.rpartition("/")[0]
    left = MemoryFileSystem().ls(folder.split("://")[1]) if path.startswith("memory") else os.listdir(local(folder))
    assert len(left) == 1
    io.remove_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        io.remove_checkpoint(path)


def local(path: str) -> str:
    return path.removeprefix("file://")


def test_pytorch_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    io.save_checkpoint({"step": 1}, tmp_path / "ours.pt")
    assert torch.load(tmp_path / "ours.pt") == {"step": 1}
    for zipped in (True, False):
        torch.save({"step": 2}, tmp_path / "theirs.pt", _use_new_zipfile_serialization=zipped)
        assert io.load_checkpoint(tmp_path / "theirs.pt") == {"step": 2}


def test_the_map_location_counts(tmp_path: Path) -> None:
    io.save_checkpoint({"w": torch.zeros(2)}, tmp_path / "a.pt")
    assert io.load_checkpoint(tmp_path / "a.pt", map_location="meta")["w"].is_meta


@pytest.mark.parametrize(
    ("content", "key", "name", "alone"),
    [
        ({"w": torch.zeros(2), "args": argparse.Namespace(lr=1)}, '["args"]', "argparse.Namespace", "Namespace"),
        (
            {"runs": [{"s": Settings(0.1)}]},
            '["runs"][0]["s"]',
            "tests.plugins.io.test_torch_io.Settings",
            "Settings",
        ),
        ({"x": {1: (0, Payload())}}, '["x"][1][1]', "tests.plugins.io.test_torch_io._attack", "_attack"),
        (Settings(0.1), "(the whole file)", "tests.plugins.io.test_torch_io.Settings", "Settings"),
        ({"cls": Settings}, '["cls"]', "tests.plugins.io.test_torch_io.Settings", "Settings"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "memory://"])
def test_a_refused_object_is_named(content: Any, key: str, name: str, alone: str, prefix: str, tmp_path: Path) -> None:
    path = f"{prefix}{tmp_path}/a.pt"
    io.save_checkpoint(content, path)
    text = (
        f"`{path}` holds an object under `{key}` that needs `{name}`, and that is not loaded by default, since"
        " unpickling it can run code. If you trust the file, pass `weights_only=False`, or allow the type alone with"
        f" `torch.serialization.add_safe_globals([{alone}])`."
    )
    with pytest.raises(pickle.UnpicklingError, match=f"^{re.escape(text)}$"):
        io.load_checkpoint(path)
    assert not Settings.ran


def test_a_trusted_file_is_loaded(tmp_path: Path) -> None:
    io.save_checkpoint({"s": Settings(0.1)}, tmp_path / "a.pt")
    assert io.load_checkpoint(tmp_path / "a.pt", weights_only=False)["s"].rate == 0.1
    with torch.serialization.safe_globals([Settings]):
        assert io.load_checkpoint(tmp_path / "a.pt")["s"].rate == 0.1


def damaged(path: Path, how: str) -> None:
    io.save_checkpoint({"w": torch.zeros(1000), "step": 1}, path)
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "text":
        path.write_text("this is no checkpoint\n" * 50)
    elif how == "pickle":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif how == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "text")
    elif how == "lost record":
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist() if not name.endswith("data/0")}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records.items():
                archive.writestr(name, data)


@pytest.mark.parametrize("prefix", ["", "memory://"])
@pytest.mark.parametrize("how", ["truncated", "empty", "text", "zip", "lost record"])
def test_a_damaged_or_foreign_file_is_named(how: str, prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    damaged(path, how)
    if prefix:
        with MemoryFileSystem().open(str(path), "wb") as file:
            file.write(path.read_bytes())
    text = (
        f"`{prefix}{path}` can't be read as a checkpoint. It is damaged or incomplete, or it was not written by"
        " `fabric.save` or `torch.save` ("
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        io.load_checkpoint(f"{prefix}{path}")


def test_a_file_cut_at_any_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    io.save_checkpoint({"w": torch.zeros(10), "step": 1}, path)
    content = path.read_bytes()
    for length in range(0, len(content), 37):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="can't be read as a checkpoint"):
            io.load_checkpoint(path)


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pt"
    text = re.escape(f"[Errno 2] No such file or directory: '{missing}'")
    with pytest.raises(FileNotFoundError, match=f"^{text}$"):
        io.load_checkpoint(missing)
    with pytest.raises(FileNotFoundError, match=re.escape("No such file or directory: 'memory://missing.pt'")):
        io.load_checkpoint("memory://missing.pt")
    text = re.escape(f"[Errno 21] Is a directory: '{tmp_path}'")
    with pytest.raises(IsADirectoryError, match=f"^{text}$"):
        io.load_checkpoint(tmp_path)


def test_a_plugin_of_the_users_needs_three_methods() -> None:
    with pytest.raises(TypeError, match=r"load_checkpoint.*remove_checkpoint.*save_checkpoint"):
        CheckpointIO()  # type: ignore[abstract]
