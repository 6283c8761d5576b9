# SPDX-License-Identifier: Apache-2.0
"""Tensors and the dimensions of their sequences: what belongs together, and what does not."""

import re
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from fabric.strategies.context.sequences import find_sequences, replace

CALL = "`fabric.context_parallel(tensors, seq_dims)`"
Pair = namedtuple("Pair", ("x", "y"))


@dataclass
class Batch:
    x: torch.Tensor
    name: str = "a"


def halves(tensors, seq_dims):
    """The first half of each sequence, and everything else as it is."""
    found = find_sequences(tensors, seq_dims, 2)
    return replace(tensors, lambda each: each.tensor if each.dim is None else each.tensor.chunk(2, each.dim)[0], found)


def shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    return [shapes(item) for item in value] if isinstance(value, (list, tuple)) else value


X, LAST = torch.zeros(3, 8), torch.zeros(8, 5)


@pytest.mark.parametrize(
    ("tensors", "seq_dims", "expected"),
    [
        (X, 1, (3, 4)),
        (X, -1, (3, 4)),
        ([X, LAST], [1, 0], [(3, 4), (4, 5)]),
        ((X, LAST), [1, None], [(3, 4), (8, 5)]),
        ((X, X), 1, [(3, 4), (3, 4)]),
        ({"x": X, "p": LAST, "id": "a"}, {"p": 0, "x": 1, "id": None}, {"x": (3, 4), "p": (4, 5), "id": "a"}),
        ({"x": X, "more": [X, {"y": X}]}, 1, {"x": (3, 4), "more": [(3, 4), {"y": (3, 4)}]}),
        ({"x": LAST, "more": [X, {"y": X}]}, {"x": 0, "more": 1}, {"x": (4, 5), "more": [(3, 4), {"y": (3, 4)}]}),
        (Pair(X, LAST), Pair(1, 0), [(3, 4), (4, 5)]),
    ],
)
def test_each_tensor_is_divided_along_its_dimension(tensors, seq_dims, expected):
    divided = halves(tensors, seq_dims)
    assert shapes(divided) == expected
    assert type(divided) is type(tensors)
    assert X.shape == (3, 8)


def test_other_containers_are_gone_through_with_one_dimension():
    divided = halves([Batch(X), "text", 3, None], 1)
    assert divided[0].x.shape == (3, 4)
    assert divided[1:] == ["text", 3, None]


@pytest.mark.parametrize(
    ("tensors", "seq_dims", "error", "text"),
    [
        (
            (X, LAST),
            (1,),
            TypeError,
            f"{CALL}: the `tuple` of 2 items at `tensors` and `(1,)` do not match. Give one dimension for all tensors,"
            " or one for each, nested as the tensors are; None leaves a tensor whole.",
        ),
        (
            {"x": X, "y": X},
            {"x": 1},
            TypeError,
            f"{CALL}: the `dict` with the keys ['x', 'y'] at `tensors` and `{{'x': 1}}` do not match. Give one"
            " dimension for all tensors, or one for each, nested as the tensors are; None leaves a tensor whole.",
        ),
        (
            {"x": X},
            {"x": [1]},
            TypeError,
            f"{CALL}: the tensor at `tensors['x']` and `[1]` do not match. Give one dimension for all tensors, or one"
            " for each, nested as the tensors are; None leaves a tensor whole.",
        ),
        (
            Batch(X),
            {"x": 1},
            TypeError,
            f"{CALL}: the `Batch` at `tensors` and `{{'x': 1}}` do not match. Give one dimension for all tensors, or"
            " one for each, nested as the tensors are; None leaves a tensor whole.",
        ),
        (
            X,
            True,
            TypeError,
            f"{CALL}: the tensor at `tensors` and `True` do not match. Give one dimension for all tensors, or one for"
            " each, nested as the tensors are; None leaves a tensor whole.",
        ),
        (
            [X, X],
            2,
            ValueError,
            f"{CALL}: `tensors[0]` has the shape (3, 8), and so no dimension 2. Name the dimension of its sequence, or"
            " None to leave it whole.",
        ),
        (
            {"x": X, "id": "a"},
            None,
            ValueError,
            f"{CALL}: there is no tensor with a sequence dimension in `tensors`, so nothing to divide.",
        ),
        (
            (X, torch.zeros(16, 5)),
            (1, 0),
            ValueError,
            f"{CALL} divides one sequence, but `tensors[0]` has 8 tokens along dimension 1 and `tensors[1]` has 16"
            " along dimension 0. Cut tables to the length of the batch first, and give a second sequence a block of"
            " its own, after this one.",
        ),
        (
            X,
            0,
            ValueError,
            f"{CALL}: the 3 tokens of `tensors` (dimension 0) can't be divided evenly by `context_parallel_size=2`."
            " Pad the batch to 4 tokens, or cut it to 2.",
        ),
        (
            torch.zeros(1, 5),
            0,
            ValueError,
            f"{CALL}: the 1 tokens of `tensors` (dimension 0) can't be divided evenly by `context_parallel_size=2`."
            " Pad the batch to 2 tokens.",
        ),
        (
            torch.zeros(0, 5),
            0,
            ValueError,
            f"{CALL}: the 0 tokens of `tensors` (dimension 0) can't be divided evenly by `context_parallel_size=2`."
            " Pad the batch to 2 tokens.",
        ),
    ],
)
def test_what_does_not_belong_together_raises(tensors, seq_dims, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        halves(tensors, seq_dims)
