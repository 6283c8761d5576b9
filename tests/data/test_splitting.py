# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import ChainDataset, IterableDataset, IterDataPipe, get_worker_info

from fabric.data.splitting import Splitting, splitting_of


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


class ByWorkers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        yield 1 if info is None else info.num_workers


def share_of_worker() -> int:
    info = get_worker_info()
    return info.num_workers


class ByWorkersElsewhere(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from [share_of_worker() for _ in range(1)]


class ByRanks(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(dist.get_rank(), 10, dist.get_world_size())


class Shuffled(IterableDataset[int]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        yield from self.inner


class Attributes(Plain):
    def __init__(self) -> None:
        self.global_rank = 0
        self.world_size = 2


class Pipe(IterDataPipe):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        yield 1


class SeedOfWorker(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield 0 if info is None else info.seed


def init(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.start = worker * 10 // info.num_workers


@pytest.mark.parametrize(
    ("dataset", "over_ranks", "over_workers"),
    [
        (Plain(), False, False),
        (SeedOfWorker(), False, False),
        (ByWorkers(), False, True),
        (ByWorkersElsewhere(), False, True),
        (ByRanks(), True, False),
        (Attributes(), True, False),
        (Shuffled(ByWorkers()), False, True),
        (Shuffled(Shuffled(ByRanks())), True, False),
        (ChainDataset([Plain(), ByWorkers()]), False, True),
        (Pipe(), True, True),
    ],
)
def test_what_a_data_set_does_by_itself(dataset: Any, over_ranks: bool, over_workers: bool) -> None:
    assert splitting_of(dataset) == Splitting(over_ranks, over_workers)


def test_the_loaders_worker_init_fn_may_split_too() -> None:
    assert splitting_of(Plain(), init) == Splitting(False, True)


@pytest.mark.filterwarnings("ignore")
def test_pipelines_of_webdataset() -> None:
    wds = pytest.importorskip("webdataset")
    by_default = wds.WebDataset("x.tar", shardshuffle=False)
    own = wds.WebDataset("x.tar", shardshuffle=False, nodesplitter=wds.split_by_node).shuffle(3).to_tuple("a")
    none = wds.WebDataset("x.tar", shardshuffle=False, nodesplitter=None, workersplitter=None)
    stages = wds.DataPipeline(wds.SimpleShardList("x.tar"), wds.split_by_worker, wds.tarfile_to_samples())
    resampled = wds.WebDataset("x.tar", resampled=True, shardshuffle=False)
    found = [splitting_of(each) for each in (by_default, own, none, stages)]
    assert found == [Splitting(True, True), Splitting(True, True), Splitting(False, False), Splitting(False, True)]
    assert splitting_of(resampled).over_ranks


def test_streams_of_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"a": [1, 2]}).to_iterable_dataset()
    assert splitting_of(stream) == Splitting(False, True)
    distributed = pytest.importorskip("datasets.distributed")
    split = distributed.split_dataset_by_node(stream, rank=0, world_size=2)
    assert splitting_of(split) == Splitting(True, True)
