# SPDX-License-Identifier: Apache-2.0
"""Tied weights in a folder: stored once, and there under each name for every reader."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fabric.checkpoint import load, save
from fabric.checkpoint.anything import open_later, write
from fabric.plugins.io import TorchCheckpointIO
from fabric.strategies import SingleDeviceStrategy
from tests.checkpoint.sharded import Net, full_state, make, optimizer_for, plain, same, train
from tests.ranks import RankContext, run_ranks

WITH: dict[str, Any] = {"access": SingleDeviceStrategy(), "io": TorchCheckpointIO()}


def restored(path: Path) -> dict[str, Any]:
    net = Net(seed=2)
    optimizer = optimizer_for(net, "adam")
    load(path, {"net": net, "optimizer": optimizer}, **WITH)
    return full_state(net, optimizer)


def read_by_pytorch(path: Path, target: Path) -> Any:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, target)
    return torch.load(target)["net"]


def data_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("data-*/*"))


@pytest.mark.parametrize("blocking", [True, False])
def test_each_name_is_there_and_the_numbers_once(blocking: bool, tmp_path: Path) -> None:
    net, optimizer = plain("adam", 2)
    state = {"net": net, "optimizer": optimizer}
    save(tmp_path / "a", state, format="sharded", checksum=True, blocking=blocking, **WITH).result()
    assert same(restored(tmp_path / "a"), full_state(net, optimizer))
    read = read_by_pytorch(tmp_path / "a", tmp_path / "b")
    assert same(read, net.state_dict())
    assert list(read) == list(net.state_dict())
    untied = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    save(tmp_path / "untied", {"net": untied}, format="sharded", **WITH)
    save(tmp_path / "tied", {"net": net}, format="sharded", **WITH)
    assert data_in(tmp_path / "untied") - data_in(tmp_path / "tied") > net.embedding.weight.nbytes  # type: ignore


def _save(context: RankContext, path: Path) -> None:
    fabric, net, optimizer = make(context, "ours2", "adam", seed=1, type="sharded")
    for step in range(2):
        train(net, optimizer, step)
    fabric.save(path, {"net": net, "optimizer": optimizer}, blocking=False).result()


@pytest.mark.ranks
def test_shards_of_tied_weights(tmp_path: Path) -> None:
    run_ranks(2, _save, tmp_path / "a")
    net, optimizer = plain("adam", 2)
    assert same(restored(tmp_path / "a"), full_state(net, optimizer), 1e-6)
    assert same(read_by_pytorch(tmp_path / "a", tmp_path / "b"), dict(net.state_dict()), 1e-6)


def test_what_is_made_of_it_stores_them_once_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net, _ = plain("adam", 1)
    save(tmp_path / "a", {"net": net}, format="sharded", **WITH)
    content = open_later(tmp_path / "a").content
    write(content, tmp_path / "b.pt", "torch", WITH["access"])
    read = torch.load(tmp_path / "b.pt")["net"]
    assert read["head.weight"].data_ptr() == read["embedding.weight"].data_ptr()
    write(content, tmp_path / "c", "safetensors", WITH["access"])
    assert net.state_dict().keys() - load_file(tmp_path / "c" / "model.safetensors").keys() == {"head.weight"}
    write(open_later(tmp_path / "b.pt").content, tmp_path / "d", "sharded", WITH["access"])
    assert data_in(tmp_path / "d") == data_in(tmp_path / "a")
