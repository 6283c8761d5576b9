# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every layout, ways to damage them, and what must hold when a damaged one is loaded."""

import copy
import json
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fabric.checkpoint import load, load_raw, save
from fabric.plugins.io import TorchCheckpointIO
from fabric.strategies import SingleDeviceStrategy
from tests.checkpoint.sharded import Net, optimizer_for, plain, train

FILES: dict[str, Any] = {"access": SingleDeviceStrategy(), "io": TorchCheckpointIO()}
ERRORS = (ValueError, OSError, pickle.UnpicklingError, RuntimeError)
EVERYTHING = ("net", "optimizer", "step", "config", "history", "pair", "average", "counter")


class Folders(SingleDeviceStrategy):
    """One process that writes folders."""

    state_dict_type = "sharded"


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count = 0
        self.total = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.total = state["count"], state["total"]


def saved_state() -> dict[str, Any]:
    net, optimizer = plain("adam", 2)
    values = {"config": {"a": 3, "b": [4, 5], "c": None}, "history": [2.0, 3.0], "pair": (3, 4)}
    return {"net": net, "optimizer": optimizer, "step": 2, **values, "average": torch.zeros(2), "counter": Counter()}


def own_state() -> dict[str, Any]:
    """What a damaged checkpoint must leave as it is."""
    net = Net(seed=2)
    optimizer = optimizer_for(net, "adam")
    train(net, optimizer, 50)
    values = {"config": {"a": 1, "b": [1]}, "history": [1.0], "pair": (1, 2)}
    return {"net": net, "optimizer": optimizer, "step": 0, **values, "average": torch.ones(2), "counter": Counter()}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """All of its values, apart from the objects."""
    return {k: copy.deepcopy(v.state_dict() if hasattr(v, "state_dict") else v) for k, v in state.items()}


def equal(a: Any, b: Any) -> bool:
    """To the last bit."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
        return same and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


def _dcp(content: dict[str, Any], path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=path, no_dist=True)


def _hugging_face(path: Path, weights: dict[str, Any], files: int) -> None:
    path.mkdir()
    names = list(weights)
    homes: dict[str, str] = {}
    for number in range(files):
        home = "pytorch_model.bin" if files == 1 else f"pytorch_model-{number + 1:05}-of-{files:05}.bin"
        torch.save({name: weights[name] for name in names[number::files]}, path / home)
        homes |= dict.fromkeys(names[number::files], home)
    if files > 1:
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": homes}))


def _lightning(path: Path, weights: dict[str, Any]) -> None:
    _dcp({"net": weights}, path)
    torch.save({"epoch": 3}, path / "meta.pt")


def _kept(path: Path) -> None:
    """As a `CheckpointManager` lays it out."""
    save(path / "step-00000002.ckpt", saved_state(), **FILES)
    (path / "step-00000002.json").write_text(json.dumps({"step": 2, "metrics": {"loss": 1.0}}))


def _weights() -> dict[str, Any]:
    return dict(saved_state()["net"].state_dict())


FOLDERS = {**FILES, "access": Folders()}
WRITERS: dict[str, Callable[[Path], Any]] = {
    "file": lambda path: save(path, saved_state(), **FILES),
    "marked file": lambda path: save(path, saved_state(), checksum=True, **FILES),
    "file of before PyTorch 1.6": lambda path: torch.save(
        {"net": _weights(), "step": 2}, path, _use_new_zipfile_serialization=False
    ),
    "folder": lambda path: save(path, saved_state(), **FOLDERS),
    "marked folder": lambda path: save(path, saved_state(), checksum=True, **FOLDERS),
    "folder by PyTorch": lambda path: _dcp({"net": _weights(), "step": 2, "history": [1, 2]}, path),
    "safetensors": lambda path: save(path, saved_state(), format="safetensors", **FILES),
    "safetensors in shards": lambda path: save(path, saved_state(), format="safetensors", max_shard_size=300, **FILES),
    "Hugging Face": lambda path: _hugging_face(path, _weights(), 1),
    "Hugging Face in shards": lambda path: _hugging_face(path, _weights(), 3),
    "Lightning Fabric": lambda path: torch.save({"net": _weights(), "step": 1}, path),
    "Lightning Fabric's folder": lambda path: _lightning(path, _weights()),
    "Lightning's Trainer": lambda path: torch.save({"state_dict": _weights(), "epoch": 1}, path),
    "kept": lambda path: _kept(path),
}
# What there is of the state, where it is not all; None: one object.
HOLDS: dict[str, tuple[str, ...] | None] = {
    "file of before PyTorch 1.6": ("net", "step"),
    "folder by PyTorch": ("net", "step", "history"),
    "Hugging Face": ("net",),
    "Hugging Face in shards": ("net",),
    "Lightning Fabric": ("net", "step"),
    "Lightning Fabric's folder": ("net",),
    "Lightning's Trainer": None,
}


def load_into(path: Path, layout: str, state: dict[str, Any]) -> None:
    """Load what the layout holds."""
    keys = HOLDS.get(layout, EVERYTHING)
    path = path / "step-00000002.ckpt" if layout == "kept" else path
    if keys is None:
        load_raw(path, state["net"], **FILES)
        return
    part = {key: state[key] for key in keys}
    try:
        load(path, part, **FILES)
    finally:
        state.update(part)


def check(path: Path, layout: str) -> str:
    """Load a checkpoint, which may be damaged, and return what came of it; raise if that is not as it should be."""
    state = own_state()
    before = copied(state)
    refused: Exception | None = None
    try:
        load_into(path, layout, state)
    except ERRORS as error:
        refused = error
    if refused is None:
        return "loaded"
    assert type(refused) not in (RecursionError, NotImplementedError, UnicodeDecodeError)
    assert str(path.parent) in str(refused), f"does not name the file: {refused}"
    assert equal(copied(state), before), f"something was changed before {refused!r}"
    return f"{type(refused).__name__}: {refused}"


def copy_of(source: Path, target: Path) -> Path:
    """A checkpoint in a folder of its own."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir()
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return target


def damage(path: Path, chance: random.Random) -> str:
    """Damage one file of a checkpoint; returns what was done."""
    file = chance.choice(sorted(entry for entry in path.parent.rglob("*") if entry.is_file()))
    data = file.read_bytes()
    how = chance.choice(list(WAYS))
    at = chance.randrange(len(data) if chance.random() < 0.5 else min(len(data), 2000))
    changed = WAYS[how](data, at, chance)
    file.unlink() if changed is None else file.write_bytes(changed)
    return f"{how} at {at} of {file.name}"


def _flipped(data: bytes, at: int, chance: random.Random) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


_FOREIGN = (
    b"",
    b"hello",
    b"[]",
    b"{}",
    b"\2\0\0\0\0\0\0\0{}",
    b"\xff" * 20,
    b"PK\3\4",
    b"\x89PNG\r\n\x1a\n" + bytes(64),
)
WAYS: dict[str, Callable[[bytes, int, random.Random], bytes | None]] = {
    "flipped": _flipped,
    "flipped thrice": lambda data, at, chance: _flipped(_flipped(_flipped(data, at, chance), 0, chance), -1, chance),
    "cut": lambda data, at, chance: data[:at],
    "cleared": lambda data, at, chance: data[:at] + bytes(len(data[at : at + 8])) + data[at + 8 :],
    "inserted": lambda data, at, chance: data[:at] + chance.randbytes(4) + data[at:],
    "repeated": lambda data, at, chance: data[:at] + data[max(0, at - 50) :],
    "random": lambda data, at, chance: chance.randbytes(len(data)),
    "foreign": lambda data, at, chance: chance.choice(_FOREIGN),
    "gone": lambda data, at, chance: None,
}
