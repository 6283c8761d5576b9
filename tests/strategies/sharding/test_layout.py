# SPDX-License-Identifier: Apache-2.0
"""Copies and shards from what the user said, for any number of ranks."""

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from fabric.strategies.sharding.layout import validated_layout

# sharding_strategy, reshard_after_forward, device_mesh; ranks, ranks of a machine; copies, shards, reshard
SIZES = [
    (None, None, None, 8, 4, 1, 8, True),
    ("full_shard", None, None, 8, 4, 1, 8, True),
    (ShardingStrategy.SHARD_GRAD_OP, None, None, 8, 4, 1, 8, False),
    (None, False, None, 8, 4, 1, 8, False),
    (None, 4, None, 8, 4, 1, 8, 4),
    ("FULL_SHARD", 4, None, 8, 4, 1, 8, 4),
    ("HYBRID_SHARD", None, None, 8, 4, 2, 4, True),
    ("HYBRID_SHARD", False, None, 64, 8, 8, 8, False),
    ("NO_SHARD", None, None, 8, 4, 8, 1, False),
    (None, None, (2, 4), 8, 8, 2, 4, True),
    (None, None, (8,), 8, 8, 1, 8, True),
    (None, None, torch.Size((4, 2)), 8, 8, 4, 2, True),
]


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_sizes(case):
    strategy, reshard, mesh, ranks, local, copies, shards, frees = case
    layout = validated_layout(strategy, reshard, mesh)
    assert layout.sizes(ranks, local) == (copies, shards)
    assert layout.reshard_after_forward is frees or layout.reshard_after_forward == frees > 1
    assert layout.is_hybrid == (copies > 1)


def test_machines_of_unlike_sizes():
    layout = validated_layout("HYBRID_SHARD", None, None)
    with pytest.raises(ValueError, match=r"6 processes are no multiple of the 4 on this one\. Pass"):
        layout.sizes(6, 4)
