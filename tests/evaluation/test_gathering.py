# SPDX-License-Identifier: Apache-2.0
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabric import Fabric
from fabric.data import _FabricDataLoader
from fabric.data.share import Share
from fabric.strategies import DDPStrategy
from tests.ranks import run_ranks

Pair = namedtuple("Pair", "first second")

ITEMS = (1, 2, 5, 8, 11)
BATCHES = (1, 3, 4, 20)


class Placed(_FabricDataLoader):
    """A loader whose last batch is that share of the global one."""

    __slots__ = ("_placed",)

    def __init__(self, share):
        object.__setattr__(self, "_inner", DataLoader(range(100), batch_size=4))
        object.__setattr__(self, "_placed", share)

    @property
    def share(self):
        return self._placed


def numbers(items, batch_size, **options):
    return DataLoader(TensorDataset(torch.arange(items)), batch_size=batch_size, **options)


def epoch(fabric, loader, in_order):
    gathered = [fabric.gather_for_metrics(batch[0], loader, in_order=in_order) for batch in loader]
    return torch.cat(gathered).tolist() if gathered else []


# ---------------------------------------------------------------------------------------------------------------------
# Whole epochs
# ---------------------------------------------------------------------------------------------------------------------
def epochs(context):
    fabric = context.fabric(strategy="ddp")
    seen = {}
    for items in ITEMS:
        for batch_size in BATCHES:
            for options in ({}, {"drop_last": True}, {"shuffle": True}, {"num_workers": 0, "shuffle": True}):
                fabric.seed_everything(items, verbose=False)
                loader = fabric.setup_dataloaders(numbers(items, batch_size, **options))
                case = (items, batch_size, *options)
                seen[case] = [epoch(fabric, loader, True), sorted(epoch(fabric, loader, False))]
    return seen


@pytest.mark.ranks
def test_every_sample_comes_once_and_in_the_order_of_the_data():
    alone = run_ranks(1, epochs)[0]
    for ranks in (2, 4):
        results = run_ranks(ranks, epochs)
        assert all(result == results[0] for result in results)
        for (items, batch_size, *options), (in_order, gathered) in results[0].items():
            if "drop_last" in options:
                kept = items // ranks // batch_size * batch_size * ranks
                assert in_order == gathered == list(range(kept))
            else:
                assert gathered == list(range(items))
                assert in_order == alone[(items, batch_size, *options)][0]
                assert "shuffle" in options or in_order == gathered


class Stream(IterableDataset):
    """Nine samples; of two ranks, the first one gets a batch more."""

    def __iter__(self):
        return iter(range(9))


def streams(context):
    fabric = context.fabric(strategy="ddp")
    loader = fabric.setup_dataloaders(DataLoader(range(12), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7]]))
    dealt = [fabric.gather_for_metrics(batch, loader, in_order=True).tolist() for batch in loader]
    stream = fabric.setup_dataloaders(DataLoader(Stream(), batch_size=2))
    split = [fabric.gather_for_metrics(batch, stream).tolist() for batch in stream]
    return dealt, split


@pytest.mark.ranks
def test_whole_batches_and_streams_of_unlike_length():
    for dealt, split in run_ranks(2, streams):
        assert dealt == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert split == [[0, 2, 1, 3], [4, 6, 5, 7], [8]]


# ---------------------------------------------------------------------------------------------------------------------
# One batch
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


def nested(rank, size):
    number = 10 * rank + torch.arange(size)
    return {
        "output": Output(number[:, None].to(torch.bfloat16) + torch.tensor([0.0, 0.5])),
        "pair": Pair(number % 2 == 0, [f"sample {n}" for n in number.tolist()]),
        "arrays": (number.numpy(), np.float64(number.numpy()[:, None, None])),
        "objects": tuple({"id": n} for n in number.tolist()),
        "complex": number * 1j,
    }


def structures(context, valid, interleaved):
    fabric = context.fabric(strategy="ddp")
    size = 3 if valid[context.rank] is None else 4 - context.rank
    loader = Placed(Share(valid[context.rank], interleaved=interleaved))
    data = nested(context.rank, size)
    data["output"].logits.requires_grad_()
    return fabric.gather_for_metrics(data, loader, in_order=True)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("valid", "interleaved", "expected"),
    [
        ((None, None), False, [0, 1, 2, 10, 11, 12]),
        ((None, None), True, [0, 10, 1, 11, 2, 12]),
        ((2, 1), True, [0, 10, 1]),
        ((3, 0), False, [0, 1, 2]),
        ((0, 2), False, [10, 11]),
        ((0, 0), False, []),
    ],
)
def test_any_nesting(valid, interleaved, expected):
    number = torch.tensor(expected, dtype=torch.int64)
    for result in run_ranks(2, structures, valid, interleaved):
        assert torch.equal(result["output"].logits, number[:, None].to(torch.bfloat16) + torch.tensor([0.0, 0.5]))
        assert not result["output"].logits.requires_grad
        assert result["output"].loss is None
        assert result["pair"].first.tolist() == [n % 2 == 0 for n in expected]
        assert result["pair"].first.dtype == torch.bool
        assert result["pair"].second == [f"sample {n}" for n in expected]
        assert result["objects"] == tuple({"id": n} for n in expected)
        assert torch.equal(result["complex"], number * 1j)
        one, two = result["arrays"]
        assert one.tolist() == expected
        assert (two.shape, two.dtype) == ((len(expected), 1, 1), np.float64)


def read_only(context):
    fabric = context.fabric(strategy="ddp")
    array = np.arange(8.0)[::-2]
    array.flags.writeable = False
    return fabric.gather_for_metrics(array, Placed(Share(None, interleaved=False))).tolist()


@pytest.mark.ranks
def test_arrays_that_pytorch_can_not_take_as_they_are():
    assert run_ranks(2, read_only) == [[7.0, 5.0, 3.0, 1.0] * 2] * 2


def generated(context):
    fabric = context.fabric(strategy="ddp")
    loader = Placed(Share(1 if context.rank else None, interleaved=True))
    tokens = torch.full((2, 1 + context.rank), context.rank)
    return fabric.gather_for_metrics({"tokens": tokens, "names": ["a", "b"]}, loader, in_order=True, pad_value=-1)


@pytest.mark.ranks
def test_other_dimensions_are_padded_on_request():
    for result in run_ranks(2, generated):
        assert result["tokens"].tolist() == [[0, -1], [1, 1], [0, -1]]
        assert result["names"] == ["a", "a", "b"]


class TwoTensorParallelRanks(DDPStrategy):
    """Ranks 2 k and 2 k + 1 read the same data."""

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.world_size // 2, "rank": self.global_rank // 2}


def groups(context):
    fabric = context.fabric(strategy=TwoTensorParallelRanks())
    loader = fabric.setup_dataloaders(numbers(7, 3))
    return epoch(fabric, loader, True), fabric.weighted_mean(context.rank // 2, 1).item()


@pytest.mark.ranks
def test_ranks_that_read_the_same_data_count_once():
    assert run_ranks(4, groups) == [(list(range(7)), 0.5)] * 4


def test_one_process_copies_nothing():
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(numbers(5, 2))
    for batch in loader:
        data = {"batch": batch, "names": ["a"] * len(batch[0])}
        assert fabric.gather_for_metrics(data, loader, in_order=True) is data
    cut = fabric.gather_for_metrics((torch.arange(3), ["a", "b", "c"]), Placed(Share(2, interleaved=False)))
    assert (cut[0].tolist(), cut[1]) == ([0, 1], ["a", "b"])


# ---------------------------------------------------------------------------------------------------------------------
# What can't be gathered
# ---------------------------------------------------------------------------------------------------------------------
ONE = torch.zeros(2)
CALL = "`fabric.gather_for_metrics(data, loader)`"
WRONG = [
    (
        (ONE, torch.tensor(1.0)),
        ValueError,
        f"{CALL} gathers one value for each sample, and `data` is a single number."
        " Use `fabric.weighted_mean(sum, count)` for a loss, or `fabric.all_gather(...)`.",
    ),
    (
        ({"x": ONE, "y": ONE}, {"x": ONE, "y": torch.zeros(3)}),
        ValueError,
        f"{CALL} needs the same number of samples (the first dimension, or the length of a list) in each value,"
        " but `data['x']` has 2, `data['y']` has 3. Pass values whose first dimension is the batch.",
    ),
    (
        (ONE, torch.zeros(5, 2)),
        ValueError,
        f"{CALL}: `data` has 5 samples (its first dimension, or its length), and the loader's batches have at most 4."
        " Pass values whose first dimension is the batch.",
    ),
    (
        (ONE, torch.zeros(1)),
        ValueError,
        f"{CALL}: `data` has 1 samples (its first dimension, or its length), and the loader's last batch has 2."
        " Pass one value for each sample of that batch.",
    ),
    (
        (ONE, {}),
        ValueError,
        f"{CALL}: there is nothing to gather in `data`, which is of type `dict`.",
    ),
    (
        (ONE, ONE.int()),
        ValueError,
        f"{CALL} needs the same values, dtypes and dimensions (but for the first) on all ranks, but got"
        " rank 0: `data` float32 [batch]; rank 1: `data` int32 [batch]. Make them alike.",
    ),
    (
        ({"x": torch.zeros(2, 3), "n": ["a", "b"]}, {"x": torch.zeros(2, 4), "n": ["a", "b"]}),
        ValueError,
        f"{CALL} needs the same values, dtypes and dimensions (but for the first) on all ranks, but got"
        " rank 0: `data['x']` float32 [batch, 3], `data['n']` list;"
        " rank 1: `data['x']` float32 [batch, 4], `data['n']` list."
        " Pad them to the same shape first, or pass `pad_value=`.",
    ),
]


def wrong_data(context):
    fabric = context.fabric(strategy="ddp")
    loader = Placed(Share(2, interleaved=False))
    errors = []
    for ranks, kind, _ in WRONG:
        with pytest.raises(kind) as raised:
            fabric.gather_for_metrics(ranks[context.rank], loader)
        errors.append(str(raised.value))
    fabric.barrier()
    return errors


@pytest.mark.ranks
def test_what_is_wrong_on_one_rank_is_told_on_all():
    assert run_ranks(2, wrong_data) == [[text for _, _, text in WRONG]] * 2


def wrong_loaders(context):
    fabric = context.fabric(strategy="ddp")
    plain = numbers(4, 2)
    fresh, other = fabric.setup_dataloaders(plain, numbers(4, 2))
    next(iter(other))
    errors = []
    for loader, kind in ((plain, TypeError), (fresh, RuntimeError)):
        with pytest.raises(kind) as raised:
            fabric.gather_for_metrics(ONE, loader if context.rank else other)
        errors.append(str(raised.value))
    with pytest.raises(ValueError, match="needs the same loader and arguments") as raised:
        fabric.gather_for_metrics(ONE, other, in_order=context.rank == 1)
    errors.append(str(raised.value))
    with pytest.raises(ValueError, match="can't hold") as raised:
        fabric.gather_for_metrics(torch.zeros(2, context.rank, dtype=torch.uint8), other, pad_value=-1)
    fabric.barrier()
    return [*errors, str(raised.value)]


@pytest.mark.ranks
def test_wrong_loaders_and_arguments():
    texts = [
        f"{CALL} takes a loader that `fabric.setup_dataloaders(...)` returned, but got `DataLoader`.",
        f"{CALL} gathers what was made of the loader's last batch, and this loader has not yielded one yet."
        " Call it inside `for batch in loader:`, with the loader of that loop.",
        f"{CALL} needs the same loader and arguments on all ranks, but got"
        " rank 0: {'in_order': False, 'pad_value': None, 'interleaved': True};"
        " rank 1: {'in_order': True, 'pad_value': None, 'interleaved': True}.",
        "`fabric.gather_for_metrics(..., pad_value=-1)`: a tensor of torch.uint8 can't hold this value."
        " Pass one that fits, or convert the tensor first.",
    ]
    assert run_ranks(2, wrong_loaders) == [texts, texts]
