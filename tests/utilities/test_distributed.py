# SPDX-License-Identifier: Apache-2.0
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from fabric.utilities.distributed import DistributedSamplerWrapper
from tests.ranks import RankContext, run_ranks

# What it deals is tested through loaders, in tests/data/test_sharding.py.


def test_it_is_a_distributed_sampler_that_shows_the_users() -> None:
    sampler = DistributedSamplerWrapper(WeightedRandomSampler([1.0, 2.0], 5), num_replicas=2, rank=1, seed=3)
    assert isinstance(sampler, DistributedSampler)
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (3, 3, 6)
    assert torch.equal(sampler.weights, torch.tensor([1.0, 2.0], dtype=torch.double))
    assert not hasattr(sampler, "other")
    first = list(sampler)
    assert list(sampler) == first
    assert list(copy.deepcopy(sampler)) == list(pickle.loads(pickle.dumps(sampler))) == first
    sampler.set_epoch(1)
    sampler.skip(4)
    assert len(list(sampler)) == 1


def _in_a_group(context: RankContext) -> tuple[int, int, list[int]]:
    context.process_group()
    sampler = DistributedSamplerWrapper(range(4))
    dist.barrier()
    return sampler.num_replicas, sampler.rank, list(sampler)


@pytest.mark.ranks
def test_ranks_come_from_the_process_group() -> None:
    assert run_ranks(2, _in_a_group) == [(2, 0, [0, 2]), (2, 1, [1, 3])]
