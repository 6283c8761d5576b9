# SPDX-License-Identifier: Apache-2.0
"""Disks that fill up or go away: the same error on all ranks, and the old checkpoint is untouched."""

import builtins
import errno
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric import Fabric
from fabric.cli import main
from tests.checkpoint.kills import Net, fill, found
from tests.checkpoint.sharded import ByHand
from tests.ranks import RankContext, run_ranks


def one_process() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric


Fault = Callable[[Path], Any]


@contextmanager
def full(_: Path) -> Iterator[None]:
    """Where room is found out about when it is synced, as on network file systems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _raising(errno.ENOSPC))
        yield


@contextmanager
def over_quota(_: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _raising(errno.EDQUOT))
        yield


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """Root may write to a folder that is only marked so; here no file can be opened for writing."""
    plain = io.open

    def refused(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not isinstance(file, int) and set(mode) & set("wax+") and str(file).startswith(str(place)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), file)
        return plain(file, mode, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", refused)
        patch.setattr(builtins, "open", refused)
        yield


def _raising(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


FAULTS: dict[str, tuple[Fault, int]] = {
    "full": (full, errno.ENOSPC),
    "over quota": (over_quota, errno.EDQUOT),
    "read only": (read_only, errno.EROFS),
}


def _save_on(context: RankContext, place: Path, format: str, strategy: str, fault: str, failing: int) -> list[Any]:
    sharded = "sharded" if format == "sharded" else "full"
    fabric = context.fabric(strategy=ByHand(strategy, sharded))
    net = Net()
    module, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9))
    state: dict[str, Any] = {"net": module, "optimizer": optimizer, "step": 1}
    fill(module, optimizer, 1)
    options: dict[str, Any] = {"format": format}
    if format == "safetensors":
        options["max_shard_size"] = 150_000
    fabric.save(place / "a", state, **options)
    before = sorted(str(path) for path in place.rglob("*"))
    fill(module, optimizer, 2)
    state["step"] = 2
    errors = []
    for blocking in (True, False) if format != "safetensors" else (True,):
        for target in ("a", "new"):
            # PyTorch's rank 0 writes the plain values, each rank its own part.
            with FAULTS[fault][0](place) if context.rank == failing else pytest.MonkeyPatch.context():
                with pytest.raises(OSError, match=str(place)) as error:
                    fabric.save(place / target, state, blocking=blocking, **options).result()
                errors.append((type(error.value).__name__, str(error.value)))
            assert sorted(str(path) for path in place.rglob("*")) == before
            fabric.barrier()
    state["step"] = 3
    fabric.load(place / "a", state)
    assert state["step"] == 1
    assert optimizer.param_groups[0]["lr"] == 1.0
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("format", "strategy", "failing"),
    [("torch", "ddp", 0), ("sharded", "fsdp2", 0), ("sharded", "fsdp2", 1), ("safetensors", "fsdp2", 0)],
)
def test_the_old_one_stays_and_all_ranks_say_why(
    format: str, strategy: str, failing: int, fault: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, _save_on, tmp_path, format, strategy, fault, failing)
    assert first == second
    number = FAULTS[fault][1]
    texts = [f"[Errno {number}] {os.strerror(number)}: '{tmp_path}/{name}'" for name in ("a", "new")]
    assert [text for _, text in first] == texts * (1 if format == "safetensors" else 2)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    state = {"net": net, "optimizer": optimizer, "step": 0}
    one_process().load(tmp_path / "a", state)
    assert found(net, optimizer, state["step"]) == {1.0}


class Vanishes:
    """Its state takes the folder away: after the save has begun, before anything is written."""

    def __init__(self, place: Path, rank: int) -> None:
        self._place = place if rank == 0 else None

    def state_dict(self) -> dict[str, Any]:
        if self._place is not None:
            shutil.rmtree(self._place)
            self._place.write_text("something else")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _save_into_nothing(context: RankContext, place: Path, format: str) -> tuple[str, str]:
    fabric = context.fabric(strategy=ByHand("ddp", "sharded" if format == "sharded" else "full"))
    place.mkdir(exist_ok=True)
    fabric.barrier()
    with pytest.raises(OSError, match=str(place)) as error:
        fabric.save(place / "a", {"net": Net(), "gone": Vanishes(place, context.rank)}, format=format)
    return type(error.value).__name__, str(error.value)


@pytest.mark.ranks
@pytest.mark.parametrize("format", ["torch", "sharded", "safetensors"])
def test_a_folder_that_goes_away(format: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _save_into_nothing, tmp_path / "place", format)
    assert first == second
    assert first[0] in ("NotADirectoryError", "FileExistsError")
    assert os.listdir(tmp_path) == ["place"]


# what killed saves left


@pytest.mark.parametrize("format", ["torch", "sharded", "safetensors"])
def test_the_next_save_removes_what_killed_ones_left(format: Any, tmp_path: Path) -> None:
    fabric = one_process()
    options = {"max_shard_size": 150_000} if format == "safetensors" else {}
    fabric.save(tmp_path / "a", {"net": Net(), "step": 1}, format=format, **options)
    kept = len(list(tmp_path.rglob("*")))
    (tmp_path / ".a.0123abcd.tmp").mkdir()
    (tmp_path / ".a.0123abcd.tmp" / ".metadata").touch()
    (tmp_path / ".a.4567abcd.tmp").touch()
    (tmp_path / ".b.4567abcd.tmp").touch()  # of another checkpoint
    if format == "safetensors":
        (tmp_path / "a" / ".model-0123abcd-00001-of-00002.safetensors.89abcdef.tmp").touch()
        (tmp_path / "a" / ".model.safetensors.index.json.89abcdef.tmp").touch()
    fabric.save(tmp_path / "a", {"net": Net(), "step": 2}, format=format, **options)
    assert len(list(tmp_path.rglob("*"))) == kept + 1
    assert fabric.load(tmp_path / "a")["step"] == 2


def test_a_rank_that_is_lost_after_the_last_step_takes_nothing_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fabric.checkpoint.folder import dcp

    fabric = one_process()
    fabric.save(tmp_path / "a", {"step": 1}, format="sharded")
    finish = dcp._Committing.finish

    def lose_a_peer(*args: Any) -> None:
        finish(*args)
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dcp._Committing, "finish", lose_a_peer)
    with pytest.raises(RuntimeError, match="Connection reset"):
        fabric.save(tmp_path / "a", {"step": 2}, format="sharded")
    assert fabric.load(tmp_path / "a")["step"] == 2


def _load_incomplete(context: RankContext, place: Path) -> str:
    fabric = context.fabric(strategy="ddp")
    with pytest.raises(ValueError, match="no checkpoint was completed there") as error:
        fabric.load(place, {"net": Net()})
    return str(error.value)


@pytest.mark.ranks
def test_a_folder_that_was_not_committed_is_refused_by_name_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_process().save(tmp_path / "a", {"net": Net()}, format="sharded")
    (tmp_path / "a" / ".metadata").unlink()
    first, second = run_ranks(2, _load_incomplete, tmp_path / "a")
    assert first == second
    assert first.startswith(f"`{tmp_path}/a` is a folder without `.metadata`")
    for command in (["inspect", f"{tmp_path}/a"], ["convert", f"{tmp_path}/a", f"{tmp_path}/b.pt"]):
        assert main(command) != 0
        assert f"`{tmp_path}/a` is a folder without `.metadata`" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a"]


MOUNTED = """
import os, subprocess, sys
import torch
from fabric import Fabric

place = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", place], check=True)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
old, new = {"values": torch.ones(20_000), "step": 1}, {"values": torch.zeros(70_000), "step": 2}
net = torch.nn.Linear(1, 1)


def failing(text, format, path):
    try:
        fabric.save(path, {"net": net, **new}, format=format)
    except OSError as error:
        assert str(error) == f"{text}: '{path}'", error
    else:
        raise AssertionError("It was saved.")


def check(text):
    for format in ("torch", "sharded", "safetensors"):
        path = f"{place}/{format}"
        before = sorted(os.listdir(place)), sorted(os.listdir(path)) if os.path.isdir(path) else []
        failing(text, format, path)
        failing(text, format, f"{place}/new")
        assert before == (sorted(os.listdir(place)), sorted(os.listdir(path)) if os.path.isdir(path) else [])
        assert fabric.load(path)["step"] == 1


for format in ("torch", "sharded", "safetensors"):
    fabric.save(f"{place}/{format}", {"net": net, "step": 1, "values": torch.ones(5000)}, format=format)
check("[Errno 28] No space left on device")
subprocess.run(["mount", "-o", "remount,ro", place], check=True)
check("[Errno 30] Read-only file system")
"""


def _can_mount() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def test_a_real_disk_that_is_full_and_one_that_is_read_only(tmp_path: Path) -> None:
    if not _can_mount():
        pytest.skip("no file system can be mounted here")
    command = ["unshare", "-rm", sys.executable, "-c", MOUNTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
