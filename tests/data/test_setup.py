# SPDX-License-Identifier: Apache-2.0
"""`fabric.setup_dataloaders`: what it hands on to the loader."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.strategies import DDPStrategy, SingleDeviceStrategy
from tests.data.test_sharding import Numbers
from tests.data.test_streams import Plain, Stateful
from tests.ranks import run_ranks


class Moving(SingleDeviceStrategy):
    """Its device is elsewhere, as far as loaders can see."""

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        return batch + 100


def setup(*loaders: Any, **kwargs: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1, strategy=Moving()).setup_dataloaders(*loaders, **kwargs)


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Numbers(9), Stateful(9)], ids=["indexed", "stream"])
def test_place_and_share_count_what_was_yielded_and_not_what_was_prefetched(dataset: Any, workers: int) -> None:
    def make(prefetch: int) -> Any:
        return setup(DataLoader(dataset, batch_size=2, num_workers=workers), prefetch=prefetch)

    loader = make(2)
    iterator = iter(loader)
    assert loader.share is None
    seen = [next(iterator).tolist() for _ in range(2)]
    assert seen == [[100, 101], [102, 103]]
    state = loader.state_dict()
    assert (state["position"], loader.share.valid) == (2, None)
    resumed = make(3)
    resumed.load_state_dict(state)
    assert batches(resumed) == [[104, 105], [106, 107], [108]]
    assert batches(resumed) == batches(make(0))


def test_nothing_is_moved_on_request() -> None:
    assert batches(setup(DataLoader(Numbers(2)), move_to_device=False, prefetch=2)) == [[0], [1]]


class Pairs(DDPStrategy):
    """Ranks 0 and 1 read the same data, and 2 and 3 the rest, as tensor-parallel ranks do."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": 2, "rank": self.global_rank // 2}


def groups(context: Any) -> Any:
    fabric = context.fabric(strategy=Pairs())
    loader = fabric.setup_dataloaders(DataLoader(Numbers(5), batch_size=2))
    stream = fabric.setup_dataloaders(DataLoader(Plain(5), batch_size=2))
    stateful = fabric.setup_dataloaders(DataLoader(Stateful(8), batch_size=2))
    next(iter(stateful))
    state = stateful.state_dict()
    stateful.load_state_dict(state)
    return batches(loader), batches(stream), len(state["streams"]), batches(stateful)


@pytest.mark.ranks
def test_the_data_parallel_rank_counts() -> None:
    first, second, third, fourth = run_ranks(4, groups)
    assert first == second == ([[0, 2], [4]], [[0, 2], [4]], 2, [[4, 6]])
    assert third == fourth == ([[1, 3], [0]], [[1, 3], [1, 3]], 2, [[5, 7]])
