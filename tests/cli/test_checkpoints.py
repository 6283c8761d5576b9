# SPDX-License-Identifier: Apache-2.0
"""`fabric inspect`, `fabric consolidate`, `fabric convert`: what they say and write, and in how little memory."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric.checkpoint import load, save
from fabric.cli import main
from fabric.plugins.io import TorchCheckpointIO
from fabric.strategies import SingleDeviceStrategy
from tests.checkpoint.sharded import Net, full_state, optimizer_for, plain, same

pytest.importorskip("safetensors")

WITH: dict[str, Any] = {"access": SingleDeviceStrategy(), "io": TorchCheckpointIO()}


def saved(path: Path, format: str) -> dict[str, Any]:
    net, optimizer = plain("adam", 2)
    save(path, {"net": net, "optimizer": optimizer, "step": 2, "deep": {"x": [1, 2]}}, format=format, **WITH)  # type: ignore[arg-type]
    return full_state(net, optimizer)


def loaded(path: Path) -> dict[str, Any]:
    net = Net(seed=2)
    optimizer = optimizer_for(net, "adam")
    state: dict[str, Any] = {"net": net, "optimizer": optimizer, "step": 0, "deep": {"x": []}}
    assert load(path, state, **WITH) == {}
    assert (state["step"], state["deep"]) == (2, {"x": [1, 2]})
    return full_state(net, optimizer)


FORMATS = ("torch", "sharded", "safetensors")


@pytest.mark.parametrize("source", FORMATS)
def test_any_format_becomes_any_other(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = saved(tmp_path / "a", source)
    for target in FORMATS:
        assert main(["convert", str(tmp_path / "a"), str(tmp_path / target), "--format", target]) == 0
        assert same(loaded(tmp_path / target), expected)
        assert main(["convert", str(tmp_path / target), str(tmp_path / f"back-{target}"), "--format", source]) == 0
        assert same(loaded(tmp_path / f"back-{target}"), expected)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path / 'torch'}: 22 tensors, 2.4 kB (torch)"


def test_consolidate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = saved(tmp_path / "a", "sharded")
    assert main(["consolidate", f"{tmp_path / 'a'}/"]) == 0
    assert same(loaded(tmp_path / "a.pt"), expected)
    net, optimizer = plain("adam", 0)
    content = torch.load(tmp_path / "a.pt")
    net.load_state_dict(content["net"])
    optimizer.load_state_dict(content["optimizer"])
    assert main(["consolidate", str(tmp_path / "a"), "--format", "safetensors"]) == 0
    assert same(loaded(tmp_path / "a.safetensors"), expected)
    size = ["--max-shard-size", "300", "--format", "safetensors"]
    assert main(["consolidate", str(tmp_path / "a"), "--output", str(tmp_path / "hub"), *size]) == 0
    assert same(loaded(tmp_path / "hub"), expected)
    assert (tmp_path / "hub" / "model.safetensors.index.json").exists()
    assert capsys.readouterr().err == ""


def test_weights_alone(tmp_path: Path) -> None:
    net, _ = plain("adam", 2)
    torch.save(net.state_dict(), tmp_path / "a.bin")
    assert main(["convert", str(tmp_path / "a.bin"), str(tmp_path / "a.safetensors")]) == 0
    from safetensors.torch import load_model

    other = Net(2)
    load_model(other, str(tmp_path / "a.safetensors"))
    assert same(other.state_dict(), net.state_dict())
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.safetensors"]
    assert main(["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.pt")]) == 0
    assert same(torch.load(tmp_path / "b.pt"), net.state_dict())


def test_what_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = saved(tmp_path / "a", "sharded")
    (tmp_path / "a.pt").write_text("old")
    assert main(["consolidate", str(tmp_path / "a")]) == 1
    assert (tmp_path / "a.pt").read_text() == "old"
    assert main(["consolidate", str(tmp_path / "a"), "--force"]) == 0
    assert same(loaded(tmp_path / "a.pt"), expected)
    assert capsys.readouterr().err == (
        f"fabric consolidate: `{tmp_path / 'a.pt'}` is there already. Name another target, or add `--force` to replace"
        " it.\n"
    )


def test_inspect_shows_shapes_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {
        "weight": torch.ones(3, 2),
        "bias": torch.ones(4, dtype=torch.bfloat16),
        "scale": torch.tensor(1.0, dtype=torch.float64),
    }
    content = {"step": 7, "name": "x" * 80, "group": {"lr": 0.5, "betas": (0.9, 0.99)}, "model": model}
    torch.save(content, tmp_path / "a.pt")
    assert main(["inspect", str(tmp_path / "a.pt")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'a.pt'}: one file (torch.save, version 3), 3 tensors, 40 B",
        "",
        "value",
        "step         7",
        f"name         '{'x' * 56}...",
        "group.lr     0.5",
        "group.betas  (0.9, 0.99)",
        "",
        "tensor        shape   dtype     size",
        "model.weight  3 x 2   float32   24 B",
        "model.bias    4       bfloat16  8 B",
        "model.scale   scalar  float64   8 B",
    ]


@pytest.mark.parametrize(
    ("format", "layout"),
    [
        ("torch", "one file (torch.save, version 3), 22 tensors, 2.4 kB"),
        ("sharded", "sharded folder (torch.distributed.checkpoint, version 1.0.0), 22 tensors, 2.4 kB"),
        ("safetensors", "1 file of weights (safetensors) and `model.training-*.pt`, 22 tensors, 2.4 kB"),
    ],
)
def test_inspect_knows_each_layout(
    format: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "a", format)
    assert main(["inspect", str(tmp_path / "a")]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    rest = [path.name for path in (tmp_path / "a").glob("*.pt")]
    assert first == f"{tmp_path / 'a'}: {layout.replace('model.training-*.pt', *rest) if rest else layout}"
    found = [line.split() for line in lines]
    assert ["step", "2"] in found
    assert ["net.head.weight", "11", "x", "6", "float32", "264", "B"] in found
    assert ["optimizer.state.0.exp_avg", "11", "x", "6", "float32", "264", "B"] in found
    assert ["optimizer.param_groups.1.lr", "0.05"] in found


def test_lightnings_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, _ = plain("adam", 2)
    save(tmp_path / "a", {"model": net}, format="sharded", **WITH)
    torch.save({"step": 7}, tmp_path / "a" / "meta.pt")
    assert main(["consolidate", str(tmp_path / "a")]) == 0
    content = torch.load(tmp_path / "a.pt")
    assert content["step"] == 7
    assert same(content["model"], net.state_dict())


class _Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("payload-ran",)


@pytest.mark.parametrize("how", ["torch", "sharded", "metadata", "rest"])
@pytest.mark.parametrize("command", ["inspect", "consolidate", "convert"])
def test_nothing_in_a_checkpoint_runs(
    command: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "a", "safetensors" if how == "rest" else "torch" if how == "torch" else "sharded")
    if how == "torch":
        if command == "consolidate":
            return
        torch.save({"x": _Payload()}, "a")
    elif how == "metadata":
        Path("a/.metadata").write_bytes(pickle.dumps(_Payload()))
    elif how == "rest":
        (path,) = Path("a").glob("*.pt")
        torch.save({"state": _Payload(), "modules": []}, path)
    else:
        torch.save({"y": _Payload()}, "a/meta.pt")
    words = {"inspect": [], "consolidate": [], "convert": ["b.pt"]}[command]
    assert main([command, "a", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"fabric {command}: ")
    assert "mkdir`, " in error
    assert os.listdir(tmp_path) == ["a"]


def _said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 1
    return capsys.readouterr().err


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "a.pt", "torch")
    os.mkdir("empty")
    assert _said(capsys, "inspect", "b") == "fabric inspect: [Errno 2] No such file or directory: 'b'\n"
    assert _said(capsys, "inspect", "b.safetensors") == (
        "fabric inspect: [Errno 2] No such file or directory: 'b.safetensors'\n"
    )
    assert _said(capsys, "consolidate", "empty") == (
        "fabric consolidate: `empty` is a folder without `.metadata`, so no checkpoint was completed there: it is"
        " written last. Name another checkpoint.\n"
    )
    assert _said(capsys, "consolidate", "a.pt") == (
        "fabric consolidate: `a.pt` is one file already. To write it in another format, type `fabric convert`.\n"
    )
    assert _said(capsys, "convert", "a.pt", "b") == (
        "fabric convert: which format should `b` have? Its ending does not say it. Add `--format torch`,"
        " `--format sharded` or `--format safetensors`.\n"
    )
    assert _said(capsys, "convert", "a.pt", "./a.pt", "--force") == (
        "fabric convert: `./a.pt` is the source. Name another target.\n"
    )
    assert _said(capsys, "convert", "a.pt", "b.pt", "--max-shard-size", "1GB") == (
        "fabric convert: `--max-shard-size 1GB` is for `--format safetensors`. Leave it out.\n"
    )
    torch.save({"step": 1}, "c.pt")
    assert _said(capsys, "convert", "c.pt", "c.safetensors") == (
        "fabric convert: `c.pt` can't be written as safetensors: it holds no weights: no dictionary of names and"
        " tensors. Choose another format.\n"
    )
    assert sorted(os.listdir()) == ["a.pt", "c.pt", "empty"]


MEASURE = """
import sys, torch
from fabric.cli import main

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

for words in (["convert", "small.pt", f"small-{n}", "--format", sys.argv[1]] for n in range(2)):
    assert main(words) == 0  # what is imported and allocated once
assert main(["convert", "small-0", "small-back.pt"]) == 0
for source, target, format in (("big.pt", "big", sys.argv[1]), ("big", "back.pt", "torch")):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = kilobytes("VmRSS")
    assert main(["convert", source, target, "--format", format]) == 0
    print(kilobytes("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux says how much memory a process had")
@pytest.mark.parametrize("format", ["safetensors", "sharded"])
def test_memory_stays_near_the_largest_tensor(format: str, tmp_path: Path) -> None:
    largest, count = 16 << 20, 12
    torch.save({"model": {str(n): torch.full((largest // 4,), float(n)) for n in range(count)}}, tmp_path / "big.pt")
    torch.save({"model": {"0": torch.ones(3)}}, tmp_path / "small.pt")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", MEASURE, format]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = [int(line) * 1024 for line in done.stdout.splitlines() if line.isdigit()]
    assert len(peaks) == 2
    assert max(peaks) < 3 * largest  # of 12 times that
    back = torch.load(tmp_path / "back.pt", mmap=True)["model"]
    assert all(bool((value == float(name)).all()) for name, value in back.items())
    assert len(back) == count


def test_what_no_list_of_rows_can_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"sparse": torch.eye(2).to_sparse(), "model": {"weight": torch.ones(3)}}, tmp_path / "a.pt")
    assert main(["inspect", str(tmp_path / "a.pt")]) == 0
    assert "model.weight  3      float32  12 B" in capsys.readouterr().out.splitlines()
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 0
    content = torch.load(tmp_path / "b.pt")
    assert torch.equal(content["sparse"].to_dense(), torch.eye(2))
    assert torch.equal(content["model"]["weight"], torch.ones(3))
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--format", "sharded"]) == 1
    assert "`sparse` is a sparse_coo tensor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [{"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, {1: torch.ones(1), "1": torch.ones(1)}]
)
def test_two_tensors_under_one_key_are_refused(
    content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--format", "sharded"]) == 1
    assert "two values would have the key" in capsys.readouterr().err
