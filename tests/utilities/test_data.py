# SPDX-License-Identifier: Apache-2.0
import copy
import os
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabric.utilities.data import AttributeDict, has_iterable_dataset, has_len, suggested_max_num_workers


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_suggested_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert [suggested_max_num_workers(n) for n in (1, 2, 4, 16, 64)] == [15, 7, 3, 1, 1]
    with pytest.raises(
        ValueError,
        match=r"^`suggested_max_num_workers\(0\)` takes the number of ranks on this machine, at least 1\.$",
    ):
        suggested_max_num_workers(0)


def test_streams_and_lengths() -> None:
    dataset = TensorDataset(torch.zeros(3))
    assert has_iterable_dataset(DataLoader(Stream()))
    assert not has_iterable_dataset(DataLoader(dataset))
    assert has_len(DataLoader(dataset))
    assert has_len([])
    assert not has_len(DataLoader(Stream()))
    assert not has_len(3)


def test_attribute_dict() -> None:
    state = AttributeDict(step=1)
    state.model = "m"
    state["step"] += 1
    assert (state.step, state["model"]) == (2, "m")
    del state.model
    assert repr(state) == "AttributeDict({'step': 2})"
    assert copy.deepcopy(state) == pickle.loads(pickle.dumps(state)) == {"step": 2}
    with pytest.raises(AttributeError, match=r"^`AttributeDict` has no key `model`\.$"):
        _ = state.model
    with pytest.raises(AttributeError, match=r"^`AttributeDict` has no key `model`\.$"):
        del state.model
