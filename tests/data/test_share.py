# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler

from fabric.data import Share, _FabricDataLoader, shard_dataloader
from fabric.utilities.distributed import DistributedSamplerWrapper
from tests.data.test_sharding import Endless, Numbers, wrap


class NoLength(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def seen(loaders: list[Any]) -> list[int]:
    """The samples of all ranks in the data's order, as the shares say."""
    order = []
    for step in zip(*loaders, strict=True):
        shares = [loader.share for loader in loaders]
        parts = [list(batch)[: share.valid] for batch, share in zip(step, shares, strict=True)]
        assert len({share.interleaved for share in shares}) == 1
        if shares[0].interleaved:
            order += [part[j] for j in range(max(map(len, parts))) for part in parts if j < len(part)]
        else:
            order += [sample for part in parts for sample in part]
    return [int(sample) for sample in order]


MAKE: dict[str, Any] = {
    "sequential": lambda length, size: DataLoader(Numbers(length), batch_size=size),
    "custom": lambda length, size: DataLoader(Numbers(length), batch_size=size, sampler=list(range(length))),
    "no length": lambda length, size: DataLoader(Numbers(length), batch_size=size, sampler=NoLength(length)),
    "whole batches": lambda length, size: DataLoader(
        Numbers(length), batch_sampler=[list(range(i, min(i + size, length))) for i in range(0, length, size)]
    ),
    "workers": lambda length, size: DataLoader(Numbers(length), batch_size=size, num_workers=1),
}


@pytest.mark.parametrize("name", MAKE)
def test_every_sample_is_valid_once_and_in_its_order(name: str) -> None:
    for n, length, size in [(1, 5, 2), (2, 5, 2), (2, 8, 2), (3, 7, 2), (4, 9, 4), (3, 1, 2), (4, 2, 1)]:
        if name == "workers" and length != 7:
            continue
        ranks = [wrap(MAKE[name](length, size), n, rank) for rank in range(n)]
        assert ranks[0].share is None
        assert seen(ranks) == list(range(length))


def test_the_share_of_each_batch() -> None:
    loader = wrap(DataLoader(Numbers(5), batch_size=2), 2, 1)
    assert [loader.share for _ in loader] == [Share(None, True), Share(0, True)]
    assert loader.share == Share(0, True)
    assert iter(loader) is not None
    assert loader.share is None
    partial = wrap(DataLoader(Numbers(7), batch_size=3), 2, 1)
    assert [partial.share for _ in partial] == [Share(None, True), Share(0, True)]
    padded = wrap(DataLoader(Numbers(5), batch_size=4), 2, 1)
    assert [padded.share for _ in padded] == [Share(2, True)]  # 1, 3, and the first sample once more
    single = wrap(DataLoader(Numbers(3), batch_size=None), 2, 1)
    assert [single.share for _ in single] == [Share(None, False), Share(0, False)]


def test_nothing_is_padded_with_drop_last_or_without_an_end() -> None:
    loader = wrap(DataLoader(Numbers(5), batch_size=2, drop_last=True), 2, 1)
    assert [loader.share for _ in loader] == [Share(None, True)]
    loader = wrap(DataLoader(Numbers(1000), batch_size=2, sampler=Endless()), 2, 1)
    next(iter(loader))
    assert loader.share == Share(None, True)


@pytest.mark.parametrize("size", [1, 2, 3, None])
def test_the_padding_of_a_distributed_sampler_counts(size: int | None) -> None:
    def make(rank: int, drop_last: bool = False) -> Any:
        sampler = DistributedSampler(Numbers(7), num_replicas=3, rank=rank, shuffle=False, drop_last=drop_last)
        loader = DataLoader(Numbers(7), batch_size=size, sampler=sampler)
        return _FabricDataLoader(shard_dataloader(loader, num_replicas=3, rank=rank, seed=0))

    ranks = [make(rank) for rank in range(3)]
    if size is None:
        assert [[rank.share.valid for _ in rank] for rank in ranks] == [
            [None, None, None],
            [None, None, 0],
            [None] * 2 + [0],
        ]
        return
    assert seen(ranks) == list(range(7))
    assert seen([make(rank, drop_last=True) for rank in range(3)]) == list(range(6))


def test_the_padding_of_our_sampler_in_the_users_hands_counts() -> None:
    ranks = []
    for rank in range(2):
        sampler = DistributedSamplerWrapper(NoLength(5), num_replicas=2, rank=rank)
        batches = BatchSampler(sampler, 2, drop_last=False)
        ranks.append(_FabricDataLoader(DataLoader(Numbers(5), batch_sampler=batches)))
    assert seen(ranks) == list(range(5))


def test_of_other_samplers_nothing_is_known() -> None:
    class Own(DistributedSampler[int]):
        pass

    sampler = Own(Numbers(5), num_replicas=2, rank=1)
    loader = _FabricDataLoader(DataLoader(Numbers(5), batch_size=2, sampler=sampler))
    assert [loader.share for _ in loader] == [Share(None, False)] * 2
    loader = _FabricDataLoader(DataLoader(Numbers(5), sampler=SequentialSampler(Numbers(5)), batch_size=4))
    assert [loader.share for _ in loader] == [Share(None, False)] * 2


def test_the_share_after_resuming_on_another_number_of_ranks() -> None:
    loader = wrap(DataLoader(Numbers(11), batch_size=2), 3, 0)
    next(iter(loader))
    state = loader.state_dict()
    ranks = [wrap(DataLoader(Numbers(11), batch_size=2), 2, rank) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert seen(ranks) == list(range(6, 11))
