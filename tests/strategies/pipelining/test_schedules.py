# SPDX-License-Identifier: Apache-2.0
"""Where stages lie; that each schedule runs is seen in `test_pipeline_parallel.py`."""

import pytest
import torch.distributed.pipelining as pipelining

from fabric.strategies.pipelining.schedules import KINDS, validate_num_microbatches, validate_num_stages


@pytest.mark.parametrize("name", KINDS)
def test_pytorch_has_it(name):
    assert hasattr(pipelining, KINDS[name].class_name)


def test_stages_go_round_or_in_the_shape_of_a_v():
    assert KINDS["1f1b"].ranks_of_stages(3, 3) == (0, 1, 2)
    assert KINDS["looped_bfs"].ranks_of_stages(6, 2) == (0, 1, 0, 1, 0, 1)
    assert KINDS["zbv_zero_bubble"].ranks_of_stages(6, 3) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("name", "num_stages", "size", "fits"),
    [
        ("gpipe", 2, 2, True),
        ("gpipe", 4, 2, False),
        ("interleaved_1f1b", 6, 2, True),
        ("interleaved_1f1b", 5, 2, False),
        ("zbv_zero_bubble", 4, 2, True),
        ("zbv_zero_bubble", 6, 2, False),
        ("1f1b", 2, 4, False),
    ],
)
def test_numbers_of_stages(name, num_stages, size, fits):
    try:
        validate_num_stages(KINDS[name], num_stages, size)
    except ValueError:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize(
    ("name", "number", "fits"),
    [
        ("1f1b", 3, False),
        ("1f1b", 4, True),
        ("gpipe", 1, True),
        ("interleaved_1f1b", 1, True),
        ("interleaved_1f1b", 5, False),
        ("interleaved_1f1b", 6, True),
        ("interleaved_zero_bubble", 7, False),
    ],
)
def test_numbers_of_micro_batches(name, number, fits):
    try:
        validate_num_microbatches(KINDS[name], number, 4, 2)
    except ValueError:
        assert not fits
    else:
        assert fits
