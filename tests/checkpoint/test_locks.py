# SPDX-License-Identifier: Apache-2.0
"""What is being loaded is not removed by those who keep a folder tidy."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.checkpoint.keeping.folder import open_folder
from fabric.plugins.io.whole_file import replacing_file
from fabric.strategies import FSDPStrategy
from tests.ranks import RankContext, run_ranks


class Removes:
    """Tries, in the middle of being restored, to remove the checkpoint that it comes from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.removed: list[bool] = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.removed.append(open_folder(str(self.path.parent)).remove(self.path.name))


def test_a_file_stays_while_it_is_loaded(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    removes = Removes(tmp_path / "a.pt")
    fabric.save(removes.path, {"value": removes, "w": 1})
    fabric.load(removes.path, {"value": removes})
    assert removes.removed == [False]
    fabric.load_raw(removes.path, removes)  # type: ignore[arg-type]
    assert removes.removed == [False, False]
    assert open_folder(str(tmp_path)).remove("a.pt")


def _load(context: RankContext, path: Path) -> list[bool]:
    fabric = context.fabric(strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}))
    model = fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    removes = Removes(path)
    fabric.save(path, {"value": removes, "model": model})
    fabric.load(path, {"value": removes, "model": model})
    return removes.removed


@pytest.mark.ranks
def test_a_folder_stays_while_it_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(2, _load, tmp_path / "folder") == [[False], [False]]


@pytest.mark.parametrize("path", ["missing.pt", "file/inside.pt"])
def test_what_is_wrong_with_a_path_is_said_by_the_reader(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=path):
        Fabric(accelerator="cpu", devices=1).load(tmp_path / path, {"w": torch.zeros(1)})


def test_a_child_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    """Such as a data worker that starts while a thread writes, or while a checkpoint is restored."""
    folder = open_folder(str(tmp_path))
    end, until = os.pipe()
    with replacing_file(tmp_path / "written", {}):
        children = [_forked(end, until)]
    (tmp_path / "read").touch()
    with folder.reading("read"):
        children.append(_forked(end, until))
    with folder.reading("written") as is_there:
        assert is_there
    assert [folder.remove(name) for name in ("written", "read")] == [True, True]
    os.close(until)
    for child in children:
        os.waitpid(child, 0)
    os.close(end)


def _forked(end: int, until: int) -> int:
    """A child that lives until nobody has `until` open."""
    child = os.fork()
    if child == 0:
        os.close(until)
        os.read(end, 1)
        os._exit(0)
    return child
