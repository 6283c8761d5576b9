# SPDX-License-Identifier: Apache-2.0
"""Bits that flip in a checkpoint are found, and what was written stays readable by PyTorch alone."""

import os
import random
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from fabric.checkpoint import load, save
from fabric.checkpoint.checksum import validate_sums
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.strategies import SingleDeviceStrategy
from fabric.utilities.cloud_io import split_url
from tests.checkpoint.sharded import Net, error_of_load, full_state, make, optimizer_for, plain, same, train
from tests.ranks import RankContext, run_ranks


class Folders(SingleDeviceStrategy):
    """One process that writes folders."""

    state_dict_type = "sharded"


WITH: dict[str, dict[str, Any]] = {
    "file": {"access": SingleDeviceStrategy(), "io": TorchCheckpointIO()},
    "folder": {"access": Folders(), "io": TorchCheckpointIO()},
}
FLIPS = 60


def texts(error: str) -> str:
    return f"^{re.escape(error)}$"


def saved(path: Any, layout: str, **options: Any) -> None:
    net, optimizer = plain("adam", 2)
    save(path, {"net": net, "optimizer": optimizer, "step": 2}, checksum=True, **options, **WITH[layout])


def loaded(path: Any, layout: str) -> dict[str, Any]:
    net = Net(seed=2)
    state = {"net": net, "optimizer": optimizer_for(net, "adam"), "step": 0}
    before = full_state(net, state["optimizer"])
    try:
        load(path, state, **WITH[layout])
    except Exception:
        assert same(full_state(net, state["optimizer"]), before)
        assert state["step"] == 0
        raise
    return {**full_state(net, state["optimizer"]), "step": state["step"]}


def expected() -> dict[str, Any]:
    return {**full_state(*plain("adam", 2)), "step": 2}


def flip(path: Path, byte: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        (value,) = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def payload_of(path: Path) -> dict[str, range]:
    """Where in a file of `torch.save` each record's bytes are."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        places = {}
        for record in archive.infolist():
            file.seek(record.header_offset + 26)
            lengths = [int.from_bytes(file.read(2), "little") for _ in range(2)]
            start = record.header_offset + 30 + sum(lengths)
            places[record.filename] = range(start, start + record.file_size)
    return places


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("layout", WITH)
def test_what_is_whole_loads(layout: str, blocking: bool, tmp_path: Path) -> None:
    saved(tmp_path / "a", layout, blocking=blocking)
    assert same(loaded(tmp_path / "a", layout), expected())


@pytest.mark.parametrize("layout", WITH)
def test_pytorch_reads_it_too(layout: str, tmp_path: Path) -> None:
    saved(tmp_path / "a", layout)
    if layout == "folder":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(tmp_path / "a", tmp_path / "b")
    path = tmp_path / ("b" if layout == "folder" else "a")
    for mmap in (False, True):
        assert same(torch.load(path, mmap=mmap)["net"], plain("adam", 2)[0].state_dict())


def test_each_flipped_payload_bit_of_a_file_is_found_and_its_tensor_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    saved(path, "file")
    places = payload_of(path)
    names = {}
    for name, place in places.items():
        if place:
            flip(path, place[0], 0)
            with pytest.raises(ValueError, match=r"^`.*/a` is damaged: the checksum of `.*` does not match") as caught:
                loaded(path, "file")
            names[name] = re.findall("`(.*?)`", str(caught.value))[1]
            flip(path, place[0], 0)
    assert {name for name in places if "/data/" not in name and places[name]} == {
        name for name, said in names.items() if said == name
    }
    assert '["net"]["up.weight"]' in names.values()
    assert '["optimizer"]["state"][0]["exp_avg"]' in names.values()
    draw = random.Random(0)
    for _ in range(FLIPS):
        byte, bit = draw.choice([byte for place in places.values() for byte in place]), draw.randrange(8)
        flip(path, byte, bit)
        with pytest.raises(ValueError, match=r"^`.*/a` is damaged: the checksum of `.*` does not match its bytes\. Lo"):
            loaded(path, "file")
        flip(path, byte, bit)
    assert same(loaded(path, "file"), expected())


@pytest.mark.parametrize("layout", WITH)
def test_a_flipped_bit_anywhere_is_found_or_does_no_harm(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    saved(path, layout)
    draw = random.Random(1)
    files = files_of(path)
    assert len(files) == (1 if layout == "file" else 2)
    found = 0
    for _ in range(FLIPS):
        file = draw.choice(files)
        byte, bit = draw.randrange(file.stat().st_size), draw.randrange(8)
        flip(file, byte, bit)
        try:
            assert same(loaded(path, layout), expected()), f"bit {bit} of byte {byte} of {file}"
        except ValueError as error:
            assert str(path) in str(error), f"bit {bit} of byte {byte} of {file}"  # noqa: PT017
            found += 1
        flip(file, byte, bit)
    assert found > FLIPS / 4


def test_each_flipped_payload_bit_of_a_folder_is_found_and_its_tensor_named(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    path = tmp_path / "a"
    saved(path, "folder")
    (data,) = path.glob("data-*/*")
    places = FileSystemReader(path).read_metadata().storage_data
    for place in places.values():
        part = tmp_path / "part"
        part.write_bytes(data.read_bytes()[place.offset : place.offset + place.length])
        byte = max(payload_of(part).values(), key=len)[-1] + place.offset
        flip(data, byte, 7)
        name = next(other.fqn for other, same in places.items() if same == place)  # tied ones have one place
        text = f"`{data}` is damaged: the checksum of `{name}` does not match its bytes. Load another checkpoint."
        with pytest.raises(ValueError, match=texts(text)):
            loaded(path, "folder")
        flip(data, byte, 7)
    flip(path / ".metadata", 100, 3)
    text = f"`{path}` is damaged: the checksum of its `.metadata` does not match its bytes. Load another checkpoint."
    with pytest.raises(ValueError, match=texts(text)):
        loaded(path, "folder")


@pytest.mark.parametrize("layout", WITH)
def test_sums_are_written_though_pytorch_was_told_not_to(layout: str, tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        saved(tmp_path / "a", layout)
        assert torch.serialization.get_crc32_options() is False
        assert same(loaded(tmp_path / "a", layout), expected())
    finally:
        torch.serialization.set_crc32_options(before)


@pytest.mark.parametrize("layout", WITH)
def test_without_it_nothing_is_checked(layout: str, tmp_path: Path) -> None:
    save(tmp_path / "a", {"values": torch.zeros(1000)}, **WITH[layout])
    (file,) = [file for file in files_of(tmp_path / "a") if file.name != ".metadata"]
    content = file.read_bytes()
    flip(file, content.index(bytes(4000)) + 2000, 0)
    assert load(tmp_path / "a", **WITH[layout])["values"].count_nonzero() == 1


@pytest.mark.parametrize("layout", WITH)
def test_a_url(layout: str) -> None:
    path = f"memory://checksum-{layout}"
    saved(path, layout)
    assert same(loaded(path, layout), expected())
    filesystem, inner = split_url(path)
    (file,) = [file for file in filesystem.find(inner) if not file.endswith(".metadata")]
    content = bytearray(filesystem.cat_file(file))
    content[content.index(Net(seed=1).frozen.weight.detach().numpy().tobytes())] ^= 1
    filesystem.pipe_file(file, bytes(content))
    name = '["net"]["frozen.weight"]' if layout == "file" else "net.frozen.weight"
    with pytest.raises(ValueError, match=re.escape(f"is damaged: the checksum of `{name}` does not match")):
        loaded(path, layout)
    filesystem.rm(inner, recursive=True)


@pytest.mark.parametrize("layout", WITH)
def test_it_takes_little_memory(layout: str, tmp_path: Path) -> None:
    save(tmp_path / "a", {"values": torch.zeros(1 << 23)}, checksum=True, **WITH[layout])  # 32 MB
    tracemalloc.start()
    try:
        validate_sums(tmp_path / "a", TorchCheckpointIO())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 1 << 18 < peak < 1 << 24


class Foreign(CheckpointIO):
    """Another format."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        raise NotImplementedError

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool = True) -> Any:
        raise NotImplementedError

    @override
    def remove_checkpoint(self, path: Any) -> None:
        raise NotImplementedError


def test_what_can_not_be(tmp_path: Path) -> None:
    text = (
        "`fabric.save(..., checksum=True)`: files are written by `Foreign` here, which has a format of its own."
        " Leave out `checksum`, or the plugin."
    )
    with pytest.raises(ValueError, match=texts(text)):
        save(tmp_path / "a", {}, checksum=True, access=SingleDeviceStrategy(), io=Foreign())


def _load_flipped(context: RankContext, path: str, type: str) -> tuple[str, bool]:
    fabric, net, optimizer = make(context, "ours2", "adam", seed=1, type=type)
    train(net, optimizer, 0)
    fabric.save(path, {"net": net}, checksum=True)
    if fabric.global_rank == 0:
        file = Path(path)
        if type == "sharded":
            file = next(iter(file.glob("data-*/__1_0.distcp")))
        tensors = (place for name, place in payload_of(file).items() if "/data/" in name or type == "sharded")
        flip(file, max(tensors, key=len)[0], 5)
    return error_of_load(fabric, path, net)


@pytest.mark.ranks
@pytest.mark.parametrize("type", ["full", "sharded"])
def test_all_ranks_say_the_same_and_nothing_is_changed(type: str, tmp_path: Path) -> None:
    errors = run_ranks(2, _load_flipped, str(tmp_path / "a"), type)
    assert errors[0] == errors[1]
    assert re.fullmatch(r"`.*/a.*` is damaged: the checksum of `.*net.*` does not match its bytes\..*", errors[0][0])
    assert errors[0][1]


def test_what_is_not_there_is_said_as_ever(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        loaded(tmp_path / "a", "file")
    os.mkdir(tmp_path / "a")
    with pytest.raises(ValueError, match="no checkpoint was completed there"):
        loaded(tmp_path / "a", "file")
