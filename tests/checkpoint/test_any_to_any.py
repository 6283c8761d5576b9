# SPDX-License-Identifier: Apache-2.0
"""Any to any: what each strategy saved, at each number of ranks, in each form, all others load bit for bit.

Every writer begins with a file of plain PyTorch and takes a step. Every reader takes one more, and is then where one
process of plain PyTorch is that never stopped.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.anywhere import (
    BEFORE,
    LAYOUTS,
    TOLERANCE,
    differences,
    plain,
    read,
    train_plain,
    values_of,
    weights_of,
    write,
    write_plain,
)
from tests.ranks import RanksError, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As on the ranks: the order of sums, and so the last bit, depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Matrix:
    """What the ranks said. Each strategy writes once, and reads what all of them wrote once.

    Args:
        folder: Where the checkpoints are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = cache(self._written)
        self.found = cache(self._found)

    def _written(self, writer: str) -> list[list[str]] | RanksError:
        """What was wrong on each rank. An error is kept like a result, so that it costs its time once."""
        (self.folder / writer).mkdir()
        if not (self.folder / "plain.pt").exists():
            write_plain(self.folder)
        try:
            return run_ranks(LAYOUTS[writer][0], write, writer, self.folder, self.folder / writer)
        except RanksError as error:
            return error

    def _found(self, reader: str) -> list[dict[str, list[str]]] | RanksError:
        folders = {w: self.folder / w for w in LAYOUTS if not isinstance(self.written(w), RanksError)}
        try:
            return run_ranks(LAYOUTS[reader][0], read, reader, folders, timeout=200)
        except RanksError as error:
            return error


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("any-to-any"))


def succeeded(result: Any) -> Any:
    if isinstance(result, RanksError):
        raise result
    return result


@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_strategy_goes_on_from_a_file_of_plain_pytorch(writer: str, matrix: Matrix) -> None:
    assert succeeded(matrix.written(writer)) == [[]] * LAYOUTS[writer][0]


@pytest.mark.parametrize("writer", LAYOUTS)
@pytest.mark.parametrize("reader", LAYOUTS)
def test_what_one_saved_the_other_goes_on_from(reader: str, writer: str, matrix: Matrix) -> None:
    succeeded(matrix.written(writer))
    assert [found[writer] for found in succeeded(matrix.found(reader))] == [[]] * LAYOUTS[reader][0]


Content = dict[str, Any]


def of_torch(folder: Path) -> Content:
    content: Content = torch.load(folder / "file.pt")
    return content


def of_safetensors(folder: Path) -> Content:
    """Its weights alone; tied ones are there once."""
    weights = pytest.importorskip("safetensors.torch").load_file(folder / "weights" / "model.safetensors")
    weights["tied.model.head.weight"] = weights["tied.model.embedding.weight"]
    return {
        name: {"model": {key.removeprefix(prefix): v for key, v in weights.items() if key.startswith(prefix)}}
        for name, prefix in (("tied", "tied.model."), ("loose", "loose.model."))
    }


def of_dcp_as_a_file(folder: Path) -> Content:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "folder", folder / "folder.pt")
    content: Content = torch.load(folder / "folder.pt")
    return {name: {"model": content[name]["model"]} for name in ("tied", "loose")}


def of_dcp_in_place(folder: Path) -> Content:
    from torch.distributed.checkpoint import load

    state = plain(0)
    content: Content = {name: {"model": state[name]["model"].state_dict()} for name in ("tied", "loose")}
    load(content, checkpoint_id=folder / "folder", no_dist=True)
    return content


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # and so it shall be
@pytest.mark.parametrize("tool", [of_torch, of_safetensors, of_dcp_as_a_file, of_dcp_in_place])
@pytest.mark.parametrize("writer", LAYOUTS)
def test_plain_pytorch_goes_on_from_all_of_them(writer: str, tool: Callable[[Path], Content], matrix: Matrix) -> None:
    succeeded(matrix.written(writer))
    content, state = tool(matrix.folder / writer), plain(0)
    expected = torch.load(matrix.folder / writer / "values.pt")
    for name in ("tied", "loose"):
        state[name]["model"].load_state_dict(content[name]["model"])
        if "optimizer" in content[name]:
            state[name]["optimizer"].load_state_dict(content[name]["optimizer"])
    if tool is not of_torch:
        weights = weights_of(state)
        assert differences(weights, {key: expected[key] for key in weights}, 0.0, {}, part=False) == []
        return
    state["tied"]["schedule"].load_state_dict(content["tied"]["schedule"])
    state |= {"step": content["step"], "seen": content["seen"]}
    assert differences(values_of(state), expected, 0.0, {}, part=False) == []
    train_plain(state)
    assert differences(values_of(state), values_of(plain(BEFORE + 2)), TOLERANCE, {}, part=False) == []
