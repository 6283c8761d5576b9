# SPDX-License-Identifier: Apache-2.0
"""Dividing a batch and joining what came of it."""

import pytest
import torch

from fabric.strategies.pipelining.microbatches import batch_size, divided, joined, tensors_in


def test_a_nested_batch_is_divided_and_joined_again():
    batch = {"x": torch.arange(10).view(5, 2), "rest": (torch.arange(5), "a word")}
    parts = divided(batch, 3)
    assert [batch_size(part, "f(x)") for part in parts] == [2, 2, 1]
    assert [part["rest"][1] for part in parts] == ["a word"] * 3
    again = joined([part["x"] for part in parts], [2, 2, 1])
    assert torch.equal(again, batch["x"])
    assert [tensor.shape for tensor in tensors_in(batch)] == [(5, 2), (5,)]


def test_one_part_is_the_batch_itself():
    batch = (torch.ones(3), 4)
    assert divided(batch, 1)[0] is batch
    assert joined([batch], [3]) is batch


def test_tensors_of_unlike_sizes_and_scalars_are_refused():
    for odd, shape in ((torch.ones(2), "[2]"), (torch.tensor(1.0), "[]")):
        with pytest.raises(ValueError, match="divides each tensor") as error:
            batch_size((torch.ones(3, 4), odd), "forward_backward(...)")
        assert str(error.value) == (
            "`forward_backward(...)` divides each tensor along its first dimension into micro-batches, but got tensors"
            f" of the shapes [3, 4], {shape}. Give all of them one entry for each sample; what is no tensor goes to"
            " every micro-batch as it is."
        )


def test_outputs_without_an_entry_per_sample_are_refused():
    with pytest.raises(ValueError, match="can't be joined") as error:
        joined([torch.ones(2), torch.ones(1)], [2, 2])
    assert str(error.value) == (
        "The model returned a tensor of shape [1] for a micro-batch of 2 samples, which can't be joined with those of"
        " the other micro-batches. Return one entry for each sample."
    )
