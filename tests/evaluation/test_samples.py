# SPDX-License-Identifier: Apache-2.0
import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fabric.evaluation.samples import map_by_sample, values_by_sample

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


NESTED = {
    "output": Output(torch.ones(2, 3)),
    "pair": Pair(torch.zeros(2), ["a", "b"]),
    "tuple": (np.ones(2), [torch.ones(2), torch.ones(2)]),
    "objects": ({"id": 1}, {"id": 2}),
    "words": np.array(["a", "b"]).tolist(),
}


def test_values_and_how_they_are_written():
    assert [path for path, _ in values_by_sample(NESTED)] == [
        "data['output'].logits",
        "data['pair'].first",
        "data['pair'].second",
        "data['tuple'][0]",
        "data['tuple'][1][0]",
        "data['tuple'][1][1]",
        "data['objects']",
        "data['words']",
    ]


def test_the_nesting_is_kept():
    first = map_by_sample(OrderedDict(NESTED), lambda value: value[:1])
    assert type(first) is OrderedDict
    assert isinstance(first["output"], Output)
    assert first["output"].logits.shape == (1, 3)
    assert first["output"].loss is None
    assert first["pair"] == Pair(torch.zeros(1), ["a"])
    assert [len(value) for value in (first["tuple"][0], *first["tuple"][1])] == [1, 1, 1]
    assert first["objects"] == ({"id": 1},)
    assert first["words"] == ["a"]


def test_where_nothing_changes_the_same_objects_come_back():
    assert map_by_sample(NESTED, lambda value: value) is NESTED


def test_an_empty_list_has_no_samples():
    assert [value for _, value in values_by_sample({"names": []})] == [[]]


@pytest.mark.parametrize(("single", "data"), [("data", torch.tensor(1.0)), ("data[1]", (torch.ones(2), np.array(3)))])
def test_a_single_number(single, data):
    text = (
        f"`fabric.gather_for_metrics(data, loader)` gathers one value for each sample, and `{single}` is a single"
        " number. Use `fabric.weighted_mean(sum, count)` for a loss, or `fabric.all_gather(...)`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        list(values_by_sample(data))


@pytest.mark.parametrize(
    ("name", "value"), [("float", 0.5), ("str", "ab"), ("set", {1, 2}), ("ndarray", np.array(["a"]))]
)
def test_what_has_no_samples(name, value):
    text = (
        "`fabric.gather_for_metrics(data, loader)` gathers tensors, arrays of numbers, and lists with one item for each"
        f" sample, and `data['x']` is of type `{name}`. Leave it out, or make it one of these."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        list(values_by_sample({"x": value}))
