# SPDX-License-Identifier: Apache-2.0
"""Bits that flip in weights that were saved as `safetensors`, in their lists, in the index and in the rest beside."""

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabric.checkpoint import save
from fabric.checkpoint.checksum import validate_sums
from fabric.plugins.io import TorchCheckpointIO
from fabric.utilities.cloud_io import split_url
from tests.checkpoint.sharded import Net, error_of_load, make, plain, same, train
from tests.checkpoint.test_checksum import expected, flip, loaded, texts
from tests.checkpoint.test_weights import SMALL, WITH
from tests.ranks import RankContext, run_ranks

pytest.importorskip("safetensors")

SIZES = {"one file": None, "several": SMALL}
AGAIN = "Load another checkpoint."


def saved(path: Any, size: Any = None, **options: Any) -> None:
    net, optimizer = plain("adam", 2)
    state = {"net": net, "optimizer": optimizer, "step": 2}
    options = {"format": "safetensors", "checksum": True, **options}
    save(path, state, max_shard_size=size, **options, **WITH).result()


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the numbers begin, and the list of tensors."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return 8 + length, json.loads(data[8 : 8 + length])


def error_of_sums(path: Path, share: int = 0, shares: int = 1) -> str:
    try:
        validate_sums(path, TorchCheckpointIO(), share=share, shares=shares)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_whole_loads_here_and_elsewhere(size: str, blocking: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved(tmp_path / "a", SIZES[size], blocking=blocking)
    assert same(loaded(tmp_path / "a", "file"), expected())
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(files) == (1 if size == "one file" else 4)
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    state = plain("adam", 2)[0].state_dict()
    assert same(weights, {name: state[name] for name in weights})
    assert state.keys() - weights.keys() == {"head.weight"}


@pytest.mark.parametrize("size", SIZES)
def test_each_flipped_bit_of_a_list_or_index_is_found(size: str, tmp_path: Path) -> None:
    saved(tmp_path, SIZES[size])
    draw = random.Random(0)
    lists = {path: header_of(path)[0] for path in sorted(tmp_path.glob("*.safetensors"))[:2]}
    lists |= {path: path.stat().st_size for path in tmp_path.glob("*.json")}
    for path, end in lists.items():
        for byte in range(end):
            bit = draw.randrange(8)
            flip(path, byte, bit)
            assert str(tmp_path) in error_of_sums(tmp_path), f"bit {bit} of byte {byte} of {path.name}"
            flip(path, byte, bit)
    assert len(lists) == (1 if size == "one file" else 3)
    assert error_of_sums(tmp_path) == ""


@pytest.mark.parametrize("size", SIZES)
def test_each_flipped_number_is_found_by_one_rank_and_its_tensor_named(size: str, tmp_path: Path) -> None:
    saved(tmp_path, SIZES[size])
    shares = set()
    for path in tmp_path.glob("*.safetensors"):
        data, tensors = header_of(path)
        for name in tensors.keys() - {"__metadata__"}:
            byte = data + tensors[name]["data_offsets"][1] - 1
            flip(path, byte, 3)
            text = f"`{path}` is damaged: the checksum of `{name}` does not match its bytes. {AGAIN}"
            with pytest.raises(ValueError, match=texts(text)):
                loaded(tmp_path, "file")
            found = [error_of_sums(tmp_path, share, 3) for share in range(3)]
            assert sorted(found) == ["", "", text]
            shares.add(found.index(text))
            flip(path, byte, 3)
    assert shares == {0, 1, 2}


def test_flipped_bits_of_the_rest_are_found_or_do_no_harm(tmp_path: Path) -> None:
    saved(tmp_path)
    (rest,) = tmp_path.glob("*.pt")
    draw = random.Random(1)
    found = 0
    for _ in range(40):
        byte, bit = draw.randrange(rest.stat().st_size), draw.randrange(8)
        flip(rest, byte, bit)
        try:
            assert same(loaded(tmp_path, "file"), expected()), f"bit {bit} of byte {byte}"
        except ValueError as error:
            assert str(rest) in str(error)  # noqa: PT017
            found += 1
        flip(rest, byte, bit)
    assert found > 10
    flip(rest, rest.stat().st_size - 1, 0)
    text = f"`{rest}` is damaged: the mark at its end, of checksums, is not there. {AGAIN}"
    assert error_of_sums(tmp_path) == text


def test_one_file_of_weights_alone_is_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    saved(path, format=None)
    for rest in tmp_path.glob("*.pt"):
        rest.unlink()
    assert error_of_sums(path) == ""
    flip(path, path.stat().st_size - 1, 0)
    assert re.fullmatch(
        rf"`{path}` is damaged: the checksum of `.*` does not match its bytes\. {AGAIN}", error_of_sums(path)
    )


def test_without_it_nothing_is_checked(tmp_path: Path) -> None:
    saved(tmp_path, checksum=False)
    path = tmp_path / "model.safetensors"
    flip(path, path.stat().st_size - 1, 0)
    assert error_of_sums(tmp_path) == ""


@pytest.mark.parametrize("size", SIZES)
def test_a_url(size: str) -> None:
    path = f"memory://weights-sums-{SIZES[size]}"
    saved(path, SIZES[size])
    assert same(loaded(path, "file"), expected())
    filesystem, inner = split_url(path)
    value = Net(seed=1).frozen.weight.detach().numpy().tobytes()
    (file,) = [name for name in filesystem.find(inner) if value in filesystem.cat_file(name)]
    content = filesystem.cat_file(file)
    filesystem.pipe_file(file, content.replace(value, bytes([value[0] ^ 1]) + value[1:]))
    with pytest.raises(ValueError, match=r"is damaged: the checksum of `frozen\.weight` does not match"):
        loaded(path, "file")
    filesystem.rm(inner, recursive=True)


def _load_flipped(context: RankContext, path: str) -> tuple[str, bool]:
    fabric, net, optimizer = make(context, "ours2", "adam", seed=1)
    train(net, optimizer, 0)
    handle = fabric.save(path, {"net": net}, format="safetensors", max_shard_size=SMALL, checksum=True, blocking=False)
    handle.result()
    fabric.load(path, {"net": net})
    fabric.barrier()
    if fabric.global_rank == 0:
        file = sorted(Path(path).glob("*.safetensors"))[-1]
        flip(file, file.stat().st_size - 1, 5)
    return error_of_load(fabric, path, net)


@pytest.mark.ranks
def test_all_ranks_say_the_same_and_nothing_is_changed(tmp_path: Path) -> None:
    errors = run_ranks(2, _load_flipped, str(tmp_path / "a"))
    assert errors[0] == errors[1]
    assert re.fullmatch(r"`.*/a/.*` is damaged: the checksum of `.*` does not match its bytes\..*", errors[0][0])
    assert errors[0][1]


def test_a_model_and_its_average(tmp_path: Path) -> None:
    """Weights of two modules, and an empty tensor among them."""
    nets = [nn.Linear(2, 3), nn.Embedding(0, 3)]
    save(tmp_path, {"nets": nets}, format="safetensors", checksum=True, **WITH)
    assert error_of_sums(tmp_path) == ""
    assert torch.load(next(tmp_path.glob("*.pt")))["fabric"] == 1
