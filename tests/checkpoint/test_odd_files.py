# SPDX-License-Identifier: Apache-2.0
"""What is no checkpoint, or was made to do harm: refused by name, at once, and without running or growing."""

import json
import os
import pickle
import shutil
import socket
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from fabric.checkpoint import load, save
from fabric.checkpoint.restoring.differences import Differences
from tests.checkpoint.damage import FILES, WRITERS, check, saved_state

pytest.importorskip("safetensors")


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link"])
def test_what_is_no_file_holds_nobody_up(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    odd = tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("odd")
    else:
        odd.symlink_to("/dev/zero" if kind == "device" else "/nowhere")
    assert check(odd, "file") != "loaded"
    names = {"safetensors": "model.safetensors", "Hugging Face": "pytorch_model.bin", "folder": "data-*/*"}
    for layout, name in {**names, "safetensors in shards": "*.index.json"}.items():
        WRITERS[layout](tmp_path / layout)
        (file,) = (tmp_path / layout).glob(name)
        file.unlink()
        file.symlink_to(odd)
        assert check(tmp_path / layout, layout) != "loaded"


@pytest.mark.parametrize("value", [torch.ones(2), [1], nn.Linear(2, 2), {"net": nn.Linear(2, 2)}, None, {1: {2: 3}}])
@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save_that_are_no_checkpoints(value: Any, zipped: bool, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a", _use_new_zipfile_serialization=zipped)
    assert check(tmp_path / "a", "file") != "loaded"


def pickled(data: bytes, path: Path, how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
    return path


def test_contents_without_an_end(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)
    often: list[Any] = [1]
    for _ in range(60):
        often = [often, often]
    for content in (itself, often):
        for net in ({}, nn.Linear):
            data = pickle.dumps({"config": content, "net": net}, protocol=2)
            assert check(pickled(data, tmp_path / "a"), "file") != "loaded"
    deep = b"\x80\x02}X\x03\x00\x00\x00net" + b"]" * 5000 + b"a" * 4999 + b"s."
    assert "nested more than" in check(pickled(deep, tmp_path / "a"), "file")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")  # 32 GB to remember one dictionary
    assert "can't have numbers as high as 2147483647" in check(folder, "folder")


def test_an_archive_that_grows(tmp_path: Path) -> None:
    save(tmp_path / "a", saved_state(), **FILES)
    with zipfile.ZipFile(tmp_path / "a") as old, zipfile.ZipFile(tmp_path / "b", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert "is compressed, which `torch.save` never does" in check(tmp_path / "b", "file")


def _edit(metadata: Any, how: str) -> None:
    item = metadata.state_dict_metadata["net.up.weight"]
    place = next(value for key, value in metadata.storage_data.items() if key.fqn == "net.up.weight")
    half = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 6]))
    changes: dict[str, tuple[Any, str, Any]] = {
        "huge": (item, "size", torch.Size([1 << 40, 1 << 40])),
        "no shape": (item, "size", None),
        "overlap": (item, "chunks", [half, half]),
        "no chunks": (item, "chunks", [3]),
        "no properties": (item, "properties", None),
        "outside": (place, "relative_path", "../../etc/passwd"),
        "absolute": (place, "relative_path", "/etc/passwd"),
        "no name": (place, "relative_path", "a\0b"),
        "beyond": (place, "offset", 1 << 50),
        "shifted": (place, "offset", place.offset + 3),
        "another": (place, "offset", 0),
        "short": (place, "length", 10),
        "encoded": (place, "transform_descriptors", ["zstd"]),
        "no paths": (metadata, "planner_data", {**metadata.planner_data, "net.up.weight": ()}),
        "odd paths": (metadata, "planner_data", {**metadata.planner_data, "net.up.weight": ("net", 3)}),
    }
    setattr(*changes[how])


HOWS = "huge,no shape,overlap,no chunks,no properties,outside,absolute,no name,beyond,shifted,another,short,encoded"


@pytest.mark.parametrize("how", [*HOWS.split(","), "no paths", "odd paths"])
def test_metadata_that_lie(how: str, tmp_path: Path) -> None:
    WRITERS["folder"](tmp_path / "a")
    file = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    _edit(metadata, how)
    file.write_bytes(pickle.dumps(metadata))
    assert check(tmp_path / "a", "folder") != "loaded"


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (b"{}", 1 << 62),
        (b"[" * 100_000, None),
        (b'{"a":' * 50_000, None),
        (json.dumps({"a": {**ENTRY, "shape": [1 << 48], "data_offsets": [0, 1 << 50]}}).encode(), None),
        (json.dumps({"a": ENTRY, "b": ENTRY}).encode(), None),
        (json.dumps({"a": {**ENTRY, "dtype": "X"}}).encode(), None),
        (json.dumps({"a": {**ENTRY, "shape": [-2]}}).encode(), None),
        (json.dumps({"__metadata__": {"x": {"y": 1}}, "a": ENTRY}).encode(), None),
        (json.dumps({"__metadata__": {"fabric.save": "9" * 5000}, "a": ENTRY}).encode(), None),
    ],
)
def test_headers_of_safetensors_that_lie(header: bytes, length: int | None, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + bytes(64))
    assert check(path, "safetensors") != "loaded"


@pytest.mark.parametrize("home", ["../x", "/etc/passwd", ".", "a\0b", "", 3, ["x"], "model.safetensors.index.json"])
def test_an_index_that_lies(home: Any, tmp_path: Path) -> None:
    WRITERS["safetensors in shards"](tmp_path / "a")
    index = tmp_path / "a" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["up.bias"] = home
    index.write_text(json.dumps(content))
    assert check(tmp_path / "a", "safetensors in shards") != "loaded"


def _without_values(content: Any) -> None:
    content["net"]["up.weight"] = torch.empty(8, 6, device="meta")


def _sparse(content: Any) -> None:
    content["net"]["up.weight"] = content["net"]["up.weight"].to_sparse()


def _groups(content: Any) -> None:
    content["optimizer"]["param_groups"] = [1, 2]


def _states(content: Any) -> None:
    content["optimizer"]["state"][0] = 3


def _step(content: Any) -> None:
    content["optimizer"]["state"][0]["step"] = "x"


def _names(content: Any) -> None:
    content["optimizer"]["param_groups"][0]["param_names"] = ["up.weight"]


@pytest.mark.parametrize("change", [_without_values, _sparse, _groups, _states, _step, _names])
def test_states_that_can_not_be_taken(change: Any, tmp_path: Path) -> None:
    save(tmp_path / "a", saved_state(), **FILES)
    content = torch.load(tmp_path / "a")
    change(content)
    torch.save(content, tmp_path / "a")
    assert "mismatched" in check(tmp_path / "a", "file")


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("layout", ["file", "safetensors", "folder"])
def test_nothing_runs(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    WRITERS[layout](tmp_path / "a")
    if layout == "folder":
        (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Payload()))
    else:
        (file,) = [tmp_path / "a"] if layout == "file" else list((tmp_path / "a").glob("*.pt"))
        torch.save({"net": {}, "args": Payload()}, file)
    assert _names_the_call(check(tmp_path / "a", layout))
    assert not (tmp_path / "ran").exists()
    if layout == "file":
        load(tmp_path / "a", weights_only=False, **FILES)
        assert (tmp_path / "ran").exists()


def _names_the_call(text: str) -> bool:
    return text.startswith("UnpicklingError") and "posix.system" in text


def test_many_differences_are_shortened() -> None:
    differences = Differences()
    differences.names("net", [f"a{n}" for n in range(300)], [f"b{n}" for n in range(200)])
    with pytest.raises(RuntimeError, match=r"\n  \.\.\. and 240 more missing, 200 more unexpected\nTo skip") as caught:
        differences.raise_if_any("a.pt")
    assert len(str(caught.value).splitlines()) == 63


def test_the_file_of_another_checkpoint(tmp_path: Path) -> None:
    """As long as the one in whose place it stands, and of other shapes."""
    WRITERS["folder"](tmp_path / "a")
    (file,) = (tmp_path / "a").glob("data-*/*")
    size = file.stat().st_size
    save(tmp_path / "b", {"x": torch.ones(100, 100)}, **FILES, format="sharded")
    (other,) = (tmp_path / "b").glob("data-*/*")
    shutil.copy(other, file)
    os.truncate(file, max(size, file.stat().st_size))
    assert check(tmp_path / "a", "folder") != "loaded"


def test_of_very_many_names_none_is_said_to_be_the_nearest() -> None:
    """Comparing each with each would take minutes."""
    differences = Differences()
    differences.names("net", [f"net.{n}" for n in range(6000)], [f"old.net.{n}" for n in range(6000)])
    with pytest.raises(RuntimeError, match=r"missing     net: net\.0\n") as caught:
        differences.raise_if_any("a.pt")
    assert "nearest" not in str(caught.value)
