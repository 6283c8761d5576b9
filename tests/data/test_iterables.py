# SPDX-License-Identifier: Apache-2.0
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fabric import Fabric
from fabric.data import Share, _FabricDataLoader
from tests.data.test_sharding import Numbers
from tests.data.test_streams import check_resume


class Batches:
    """Something that is iterated over and has a name."""

    name = "mine"

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6).split(2))

    def __len__(self) -> int:
        return 3


class Counting:
    """Goes on where it was; one after another, its epochs are the next numbers."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.number += 1
            yield self.number
            if self.number % 4 == 0:
                return

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


@pytest.fixture
def fabric() -> Any:
    return Fabric(accelerator="cpu", devices=1)


def generator() -> Iterator[int]:
    yield from (1, 2, 3)


def test_batches_are_moved_and_counted(fabric: Any) -> None:
    loader = _FabricDataLoader(Batches(), move=lambda batch: batch + 10)
    assert loader.share is None
    states = [(batch.tolist(), loader.state_dict()["position"], loader.share) for batch in loader]
    assert states == [
        ([10, 11], 1, Share(None, False)),
        ([12, 13], 2, Share(None, False)),
        ([14, 15], 3, Share(None, False)),
    ]
    assert loader.state_dict() == {"epoch": 1, "position": 0, "consumed": 0, "seed": None}
    assert (len(loader), loader.name, isinstance(loader, Batches)) == (3, "mine", True)


def test_any_iterable_can_be_set_up(fabric: Any) -> None:
    values, numbers, made = fabric.setup_dataloaders([1, 2], range(3), generator())
    assert [list(values), list(numbers), list(made)] == [[1, 2], [0, 1, 2], [1, 2, 3]]
    assert list(values) == [1, 2]
    assert not isinstance(values, list)
    assert not isinstance(made, Iterator)
    with pytest.raises(TypeError, match=r"^object of type 'generator' has no len\(\)$"):
        len(made)


@pytest.mark.filterwarnings("ignore")
def test_loaders_of_webdataset_are_only_moved(fabric: Any) -> None:
    wds = pytest.importorskip("webdataset")
    loader = fabric.setup_dataloaders(wds.WebLoader(Numbers(4), batch_size=2).with_epoch(2))
    assert isinstance(loader, wds.WebLoader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_resume() -> None:
    check_resume(lambda: _FabricDataLoader(Counting()))


def test_resume_without_a_state() -> None:
    state = {"epoch": 0, "position": 2, "consumed": 2, "seed": None}
    with pytest.raises(
        RuntimeError,
        match="^"
        + re.escape(
            "The loader was saved after 2 batches of epoch 0, and it is a `Batches` without a place to go to. Give it"
            " `state_dict` and `load_state_dict`, save at the end of an epoch, or load the first batches once more with"
            " `fabric.setup_dataloaders(..., replay=True)`."
        )
        + "$",
    ):
        _FabricDataLoader(Batches()).load_state_dict(state)


def test_replay(fabric: Any) -> None:
    loader = fabric.setup_dataloaders(Batches(), replay=True)
    loader.load_state_dict({"epoch": 0, "position": 2, "consumed": 2, "seed": None})
    assert [batch.tolist() for batch in loader] == [[4, 5]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


WRONG = {
    "list of loaders": (lambda: [DataLoader([1])], "list", "Pass loaders one by one: `setup_dataloaders(*loaders)`."),
    "dict": (
        lambda: {"train": DataLoader([1])},
        "dict",
        "Pass loaders one by one: `setup_dataloaders(*loaders.values())`.",
    ),
    "data set": (
        Numbers,
        "Numbers",
        "Wrap it: `torch.utils.data.DataLoader(dataset, batch_size=...)`.",
    ),
    "stream": (Stream, "Stream", "Wrap it: `torch.utils.data.DataLoader(dataset, batch_size=...)`."),
    "string": (lambda: "train", "str", "Pass a `torch.utils.data.DataLoader`."),
    "tensor": (lambda: torch.zeros(3), "Tensor", "Pass a `torch.utils.data.DataLoader`."),
    "function": (
        lambda: generator,
        "function",
        "Pass a `torch.utils.data.DataLoader`. If it is a function that makes batches, call it.",
    ),
    "none": (lambda: None, "NoneType", "Pass a `torch.utils.data.DataLoader`."),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_loader(fabric: Any, name: str) -> None:
    make, kind, hint = WRONG[name]
    text = (
        f"`fabric.setup_dataloaders(...)` takes data loaders or other iterables over batches, but got `{kind}`. {hint}"
    )
    with pytest.raises(TypeError, match="^" + re.escape(text) + "$"):
        fabric.setup_dataloaders(make())


@pytest.mark.parametrize("prefetch", [-1, 1.5, True, "2"])
def test_prefetch_is_a_number_of_batches(fabric: Any, prefetch: Any) -> None:
    text = (
        f"`fabric.setup_dataloaders(..., prefetch={prefetch!r})` takes the number of batches to move ahead: an integer,"
        " 0 or more."
    )
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        fabric.setup_dataloaders(DataLoader([1]), prefetch=prefetch)


def test_batches_come_in_order(fabric: Any) -> None:
    fabric.setup_dataloaders(DataLoader([1], num_workers=1, in_order=False))
    text = (
        "`DataLoader(in_order=False)` yields batches as its workers finish them, so that the ranks' batches do not"
        " belong together and no place can be gone back to. Leave `in_order` out."
    )
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        fabric.setup_dataloaders(DataLoader([1], num_workers=2, in_order=False))


def test_ways_to_end(fabric: Any) -> None:
    text = "`fabric.setup_dataloaders(..., uneven='wait')` is not a way to end. Choose one of 'pad', 'stop'."
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        fabric.setup_dataloaders(DataLoader([1]), uneven="wait")
