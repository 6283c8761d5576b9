# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a bucket: the same as on a disk, and never half."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric import Fabric
from fabric.checkpoint import CheckpointManager
from fabric.cli import main
from fabric.plugins.io.whole_file import replacing_file
from tests.checkpoint.buckets import in_bucket, running_s3, uploads, using_s3
from tests.checkpoint.sharded import Net, full_state, make, optimizer_for, plain, same, train
from tests.ranks import RankContext, run_ranks

pytest.importorskip("s3fs")
pytest.importorskip("moto")

FORMATS = ("torch", "sharded", "safetensors")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_s3() as address:
        with using_s3(address) as files:
            files.mkdir("runs")
        yield address


@pytest.fixture
def files(address: str) -> Iterator[Any]:
    with using_s3(address) as files:
        yield files
        files.rm(files.ls("runs"), recursive=True) if files.ls("runs", refresh=True) else None


@pytest.fixture
def fabric() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric


def at(steps: int) -> dict[str, Any]:
    net, optimizer = plain("adam", steps)
    return {"net": net, "optimizer": optimizer, "step": steps}


def loaded(fabric: Fabric, path: str) -> dict[str, Any]:
    net = Net(seed=2)
    optimizer = optimizer_for(net, "adam")
    state = {"net": net, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    return {**full_state(net, optimizer), "step": state["step"]}


def expected(steps: int) -> dict[str, Any]:
    return {**full_state(*plain("adam", steps)), "step": steps}


@pytest.mark.parametrize("format", FORMATS)
def test_it_comes_back_and_is_replaced(format: Any, fabric: Fabric, files: Any) -> None:
    for steps in (1, 2):
        fabric.save("s3://runs/a", at(steps), format=format)
    assert same(loaded(fabric, "s3://runs/a"), expected(2))
    assert len(in_bucket(files, "runs")) == {"torch": 1, "sharded": 2, "safetensors": 2}[format]


def test_with_several_files_of_weights(fabric: Fabric, files: Any) -> None:
    for steps in (1, 2):
        fabric.save("s3://runs/a", at(steps), format="safetensors", max_shard_size=300)
    assert same(loaded(fabric, "s3://runs/a"), expected(2))
    assert len([name for name in in_bucket(files, "runs/a") if name.endswith(".json")]) == 1


def test_layouts_take_each_others_place(fabric: Fabric, files: Any) -> None:
    for steps, format in enumerate(("torch", "sharded", "safetensors", "sharded"), start=1):
        fabric.save("s3://runs/a", at(steps), format=format)
        assert same(loaded(fabric, "s3://runs/a"), expected(steps))
    assert len(in_bucket(files, "runs")) == 2
    with pytest.raises(IsADirectoryError, match=re.escape("[Errno 21] Is a directory: 's3://runs/a'")):
        fabric.save("s3://runs/a", at(5), format="torch")
    for steps, format in enumerate(("torch", "safetensors"), start=1):
        fabric.save("s3://runs/b", at(steps), format=format)
        assert same(loaded(fabric, "s3://runs/b"), expected(steps))


@pytest.mark.parametrize("format", ["torch", "sharded"])
def test_beside_the_loop_and_with_sums(format: Any, fabric: Fabric, files: Any) -> None:
    fabric.save("s3://runs/a", at(2), format=format, blocking=False, checksum=True).result()
    assert same(loaded(fabric, "s3://runs/a"), expected(2))
    name = f"runs/a/{in_bucket(files, 'runs/a')[-1]}" if format == "sharded" else "runs/a"
    content = bytearray(files.cat(name))
    content[content.index(plain("adam", 2)[0].down.weight.detach().numpy().tobytes()) + 5] ^= 1
    files.pipe(name, bytes(content))
    with pytest.raises(ValueError, match="is damaged: "):
        loaded(fabric, "s3://runs/a")


def test_a_folder_that_is_not_complete(fabric: Fabric, files: Any) -> None:
    fabric.save("s3://runs/a", at(1), format="sharded")
    files.rm("runs/a/.metadata")
    with pytest.raises(ValueError, match=r"`s3://runs/a` is a folder without `\.metadata`"):
        loaded(fabric, "s3://runs/a")


def test_the_command_line(fabric: Fabric, files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fabric.save("s3://runs/a", at(2), format="sharded")
    for target in ("s3://runs/b.pt", "s3://runs/c.safetensors", "s3://runs/d"):
        options = ["--format", "sharded"] if target.endswith("d") else []
        assert main(["convert", "s3://runs/a", target, *options]) == 0
    assert main(["inspect", "s3://runs/b.pt"]) == 0
    assert "embedding.weight" in capsys.readouterr().out
    for path in ("s3://runs/b.pt", "s3://runs/d"):
        assert same(loaded(fabric, path), expected(2))


@pytest.mark.parametrize("sharded", [False, True])
def test_keeping_some(sharded: bool, files: Any) -> None:
    from tests.checkpoint.kills import Folders

    fabric = Fabric(accelerator="cpu", devices=1, strategy=Folders() if sharded else "auto")
    fabric.launch()
    options: dict[str, Any] = {"keep_last": 1, "keep_best": ("loss", "min"), "signals": ()}
    with CheckpointManager("s3://runs/kept", fabric=fabric, **options) as checkpoints:
        assert checkpoints.restore(at(0)) is None
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0)):
            checkpoints.save(step, at(step), {"loss": loss})
    with CheckpointManager("s3://runs/kept", fabric=fabric, **options) as checkpoints:
        assert [kept.step for kept in checkpoints.kept()] == [2, 4]
        assert checkpoints.best() == "s3://runs/kept/step-00000002.ckpt"
        files.rm("runs/kept/step-00000004.ckpt", recursive=True)  # as another process would
        assert checkpoints.latest() == "s3://runs/kept/step-00000002.ckpt"
    assert len(in_bucket(files, "runs/kept")) == (4 if sharded else 3)  # and the note of step 4


# errors


def error_of(function: Any, *args: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(OSError, match="s3://") as error:
        function(*args, **options)
    return type(error.value).__name__, str(error.value)


def _two_ranks(context: RankContext, address: str) -> list[Any]:
    """All layouts by two ranks, and what goes wrong in the same way on both."""
    errors = []
    with using_s3(address) as files:
        fabric, net, optimizer = make(context, "fsdp2", "adam", seed=1, type="sharded")
        for step in range(3):
            train(net, optimizer, step)
        for format in FORMATS:
            state = {"net": net, "optimizer": optimizer, "step": 3}
            fabric.save(f"s3://runs/{format}", state, format=format)
        for format in FORMATS:
            for bucket in ("s3://none/a", "s3://runs/none/a"):
                errors.append(error_of(fabric.load, bucket))
            errors.append(error_of(fabric.save, "s3://none/a", {"net": net}, format=format))
            if format != "safetensors":
                handle = fabric.save("s3://none/a", {"net": net}, format=format, blocking=False)
                errors.append(error_of(handle.result))
        with CheckpointManager("s3://none/a", fabric=fabric, signals=()) as checkpoints:
            errors.append(error_of(checkpoints.latest))
        assert not files.exists("none")
    return errors


NO_BUCKET = "[Errno 2] No such file or directory (The specified bucket does not exist): 's3://none/a"


@pytest.mark.ranks
def test_two_ranks(address: str, fabric: Fabric, files: Any) -> None:
    first, second = run_ranks(2, _two_ranks, address)
    assert first == second
    assert {kind for kind, _ in first} == {"FileNotFoundError"}
    assert {text for _, text in first} == {f"{NO_BUCKET}'", "[Errno 2] No such file or directory: 's3://runs/none/a'"}
    for format in FORMATS:
        assert same(loaded(fabric, f"s3://runs/{format}"), expected(3), tolerance=1e-6)


def _refused(context: RankContext, address: str) -> list[Any]:
    with using_s3(address, key="AKIANOBODY", secret="wrong"):
        fabric, net, _ = make(context, "fsdp2", "adam", seed=1, type="sharded")
        errors = [error_of(fabric.save, "s3://runs/a", {"net": net}, format=format) for format in FORMATS]
        return [*errors, error_of(fabric.load, "s3://runs/a")]


@pytest.mark.ranks
def test_wrong_keys_are_said_to_be_wrong_on_all_ranks(address: str) -> None:
    import urllib.request

    def look_at_keys_after(count: bytes) -> None:
        request = urllib.request.Request(
            f"{address}/moto-api/reset-auth", data=count, headers={"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request).close()

    look_at_keys_after(b"0")
    try:
        first, second = run_ranks(2, _refused, address)
    finally:
        look_at_keys_after(b"inf")
    assert first == second
    assert {kind for kind, _ in first} == {"PermissionError"}
    assert all("s3://runs/a" in text for _, text in first)


def test_without_keys_and_without_a_server(fabric: Fabric, address: str) -> None:
    for options in ({"key": None, "secret": None}, {"endpoint_url": "http://127.0.0.1:9"}):
        with using_s3(address, **options), pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", "/nowhere")
            patch.setattr("s3fs.S3FileSystem.retries", 1)
            for format in FORMATS:
                error_of(fabric.save, "s3://runs/a", {"net": Net(1)}, format=format)
            error_of(fabric.load, "s3://runs/a")


# never half


SCRIPT = """
import sys
from s3fs.core import S3File
from tests.checkpoint.buckets import using_s3
from fabric import Fabric
import torch

with using_s3(sys.argv[1], default_block_size=5 << 20):
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    upload = S3File._upload_chunk

    def stopped(self, final=False):
        upload(self, final)
        if not final:
            print("now", flush=True)
            sys.stdin.read()

    S3File._upload_chunk = stopped
    fabric.save("s3://runs/a", {"values": torch.ones(5_000_000), "step": 2}, format=sys.argv[2])
"""


@pytest.mark.parametrize("format", ["torch", "sharded"])
def test_a_kill_in_the_middle_of_an_upload_leaves_the_old_one(
    format: Any, address: str, fabric: Fabric, files: Any
) -> None:
    fabric.save("s3://runs/a", {"values": torch.zeros(10), "step": 1}, format=format)
    before = in_bucket(files, "runs")
    command = [sys.executable, "-c", SCRIPT, address, format]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert len(uploads(files, "runs")) == 1
    assert in_bucket(files, "runs") == before
    assert fabric.load("s3://runs/a")["step"] == 1
    fabric.save("s3://runs/a", {"values": torch.ones(10), "step": 3}, format=format)
    assert len(in_bucket(files, "runs")) == len(before)
    files.clear_multipart_uploads("runs")


def stop_in_the_middle(files: Any) -> None:
    with replacing_file("s3://runs/a", {}) as file:
        file.write(bytes(12 << 20))
        assert uploads(files, "runs") == ["a"]
        raise ZeroDivisionError


def test_an_error_leaves_the_old_one_and_no_upload(address: str) -> None:
    with using_s3(address, default_block_size=5 << 20) as files:
        files.pipe("runs/a", b"old")
        with pytest.raises(ZeroDivisionError):
            stop_in_the_middle(files)
        assert uploads(files, "runs") == []
        assert in_bucket(files, "runs") == ["a"]
        assert files.cat("runs/a") == b"old"
        files.rm("runs/a")


AT_THE_END = """
import sys
import fsspec
from tests.checkpoint.buckets import KEYS
from fabric import Fabric

fsspec.config.conf["s3"] = {"endpoint_url": sys.argv[1], **KEYS}
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.save("s3://runs/a", {"step": 1}, blocking=False)
"""


def test_the_end_of_a_script_waits_though_a_host_has_to_be_looked_up(address: str, fabric: Fabric, files: Any) -> None:
    command = [sys.executable, "-c", AT_THE_END, address.replace("127.0.0.1", "localhost")]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert fabric.load("s3://runs/a") == {"step": 1}


# forks


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Each worker reads from the bucket, after the parent did."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        return torch.tensor(fabric.load("s3://runs/a")["step"] + index)


def test_workers_of_a_loader_read_too(fabric: Fabric, files: Any) -> None:
    fabric.save("s3://runs/a", {"step": 5})
    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork", timeout=60)
    assert [int(row) for row in loader] == [5, 6, 7, 8]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, fabric: Fabric) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setattr("fabric.utilities.imports.is_installed", lambda requirement: False)
    text = "`s3://runs/a` needs 's3fs'. Install it with: pip install 'fabric-runtime[s3]'"
    with pytest.raises(ModuleNotFoundError, match=re.escape(text)):
        fabric.load("s3://runs/a")
