# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fabric.data import _FabricDataLoader
from tests.data.test_sharding import Numbers, batches, flat, wrap


class Custom(DataLoader[int]):
    """Everything that a subclass may do."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(Numbers(6), **kwargs)
        self.name = name

    @property
    def upper(self) -> str:
        return self.name.upper()

    @upper.setter
    def upper(self, value: str) -> None:
        self.name = value.lower()

    @property
    def broken(self) -> str:
        raise AttributeError("inside the property")

    def batches_and_names(self) -> list[Any]:
        return [(batch.tolist(), self.name) for batch in super().__iter__()]

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + 100

    def __len__(self) -> int:
        return 42


def test_it_is_an_instance_of_the_users_class() -> None:
    loader = wrap(Custom("a"))
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, Custom)
    assert isinstance(loader, _FabricDataLoader)
    assert not isinstance(wrap(DataLoader(Numbers())), Custom)
    assert type(loader) is _FabricDataLoader


def test_it_shows_the_users_attributes_and_methods() -> None:
    loader = wrap(Custom("a", batch_size=3, num_workers=0), 2, 0)
    assert (loader.name, loader.upper, loader.batch_size, len(loader.dataset)) == ("a", "A", 3, 6)
    assert loader.batches_and_names() == [([0, 2, 4], "a")]
    assert batches(loader) == [[100, 102, 104]]
    assert len(loader) == 42
    assert {"name", "upper", "batches_and_names", "dataset", "loader", "state_dict", "set_epoch"} <= set(dir(loader))
    assert vars(loader)["name"] == "a"
    assert not hasattr(loader, "other")


def test_attributes_are_set_and_deleted_on_what_is_iterated() -> None:
    loader = wrap(Custom("a"))
    loader.upper = "B"
    loader.extra = 1
    assert (loader.name, loader.extra) == ("b", 1)
    assert not hasattr(loader.loader, "extra")
    del loader.extra
    assert not hasattr(loader, "extra")
    loader.collate_fn = lambda items: torch.tensor(items) * 2
    assert batches(loader)[:2] == [[100], [102]]
    with pytest.raises(ValueError, match=r"^sampler attribute should not be set after Custom is initialized$"):
        loader.sampler = None


def test_an_error_inside_a_property_is_the_one_that_is_seen() -> None:
    with pytest.raises(AttributeError, match=r"^inside the property$"):
        _ = wrap(Custom("a")).broken


def test_batches_are_moved() -> None:
    loader = _FabricDataLoader(DataLoader(Numbers(4), batch_size=2), move=lambda batch: batch + 1)
    assert batches(loader) == [[1, 2], [3, 4]]


def test_copies_and_pickles_are_plain_loaders() -> None:
    loader = wrap(DataLoader(Numbers(4), batch_size=2), 2, 1)
    for plain in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(plain) is DataLoader
        assert batches(plain) == [[0, 1], [2, 3]]


def test_repr() -> None:
    loader = wrap(DataLoader(Numbers(4), batch_size=2))
    assert repr(loader) == f"_FabricDataLoader({loader._inner!r})"


def test_it_holds_on_to_no_batch() -> None:
    loader = wrap(DataLoader(Numbers(4), batch_size=2))
    for batch in loader:
        gone = weakref.ref(batch)
        del batch
        assert gone() is None


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_the_iteration(persistent: bool) -> None:
    loader = wrap(DataLoader(Numbers(20), batch_size=2, num_workers=1, persistent_workers=persistent, shuffle=True))
    for _ in loader:
        break
    assert sorted(flat(batches(loader))) == list(range(20))
    del loader
    gc.collect()  # the fixture that watches for processes says whether they are gone
