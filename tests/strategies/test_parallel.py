# SPDX-License-Identifier: Apache-2.0
import re
import time

import pytest
import torch
import torch.distributed as dist

from fabric.strategies import DDPStrategy
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _collectives(context):
    strategy = context.fabric(strategy="ddp").strategy
    rank = context.rank
    mine = torch.tensor([rank, rank + 1])
    results = {
        "gathered": strategy.all_gather(mine),
        "mean": strategy.all_reduce(mine),
        "sum": strategy.all_reduce(mine, reduce_op="sum"),
        "max": strategy.all_reduce(mine, reduce_op="max"),
        "product": strategy.all_reduce(mine + 1, reduce_op="product"),
        "bools": strategy.all_reduce(torch.tensor([rank == 0, True]), reduce_op="sum"),
        "bytes": strategy.all_reduce(torch.tensor([200 + rank], dtype=torch.uint8)),
        "scalar": strategy.all_gather(torch.tensor(float(rank))),
        "shorts": [strategy.all_gather(torch.full(s, rank + 256, dtype=torch.int16)) for s in ((), (1, 2), (0, 3))],
        "broadcast": strategy.broadcast({"rank": rank}, src=1),
        "objects": strategy.gather_objects(f"rank {rank}"),
        "all": strategy.reduce_boolean_decision(rank == 0),
        "any": strategy.reduce_boolean_decision(rank == 0, all=False),
    }
    votes = [strategy.start_boolean_decision(rank == 0, all=every) for every in (True, False)]
    strategy.barrier()  # others go on meanwhile
    results["votes"] = [decided() for decided in reversed(votes)]
    assert torch.equal(mine, torch.tensor([rank, rank + 1]))  # reduced into a new tensor
    strategy.barrier()
    return results


def test_collectives():
    for results in run_ranks(2, _collectives):
        assert results["gathered"].tolist() == [[0, 1], [1, 2]]
        assert results["mean"].tolist() == [0.5, 1.5]
        assert results["sum"].tolist() == [1, 3]
        assert results["max"].tolist() == [1, 2]
        assert results["product"].tolist() == [2, 6]
        assert results["bools"].tolist() == [1, 2]
        assert results["bytes"].tolist() == [200.5]
        assert results["scalar"].tolist() == [0.0, 1.0]
        assert [short.tolist() for short in results["shorts"]] == [[256, 257], [[[256] * 2], [[257] * 2]], [[], []]]
        assert results["broadcast"] == {"rank": 1}
        assert results["objects"] == ["rank 0", "rank 1"]
        assert results["all"] is False
        assert results["any"] is True
        assert results["votes"] == [True, False]


def _ragged(context, call):
    strategy = context.fabric(strategy="ddp").strategy
    with pytest.raises(ValueError, match="needs tensors of one shape") as raised:
        getattr(strategy, call)(torch.zeros(2, context.rank + 1))
    strategy.barrier()  # the group survives
    return str(raised.value)


@pytest.mark.parametrize("call", ["all_gather", "all_reduce"])
def test_unlike_shapes_are_named_on_every_rank(call):
    hint = {"all_gather": ", or pass `pad_value=`", "all_reduce": ""}[call]
    text = (
        f"`fabric.{call}(...)` needs tensors of one shape and dtype on all ranks, but got rank 0: float32 [2, 1];"
        f" rank 1: float32 [2, 2]. Pad them to the same shape first{hint}."
    )
    assert run_ranks(2, _ragged, call) == [text, text]


def _gradients(context):
    strategy = context.fabric(strategy="ddp").strategy
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    # Rank r weighs the part of rank p with (r + 1) * (p + 1).
    weights = torch.tensor([[1.0], [2.0]]) * (context.rank + 1)
    (strategy.all_gather(x, sync_grads=True) * weights).sum().backward()
    assert not strategy.all_gather(x).requires_grad
    return x.grad.tolist()


def test_gradients_flow_back_to_the_rank_that_contributed():
    assert run_ranks(2, _gradients) == [[3.0, 3.0], [6.0, 6.0]]


def _one_rank(context):
    strategy = context.fabric(strategy="ddp").strategy
    assert strategy.all_gather(torch.ones(2), pad_value=0).shape == strategy.gather_alike(torch.ones(2)).shape == (2,)
    return strategy.all_gather(torch.ones(2)).shape, strategy.broadcast("x"), strategy.all_reduce(torch.ones(1)).item()


def test_one_rank_gets_no_extra_dimension():
    assert run_ranks(1, _one_rank) == [((2,), "x", 1.0)]


def test_an_unknown_start_method():
    text = (
        "`DDPStrategy(start_method='thread')` is not a way to start processes."
        " Choose one of subprocess, spawn, fork, forkserver."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        DDPStrategy(start_method="thread")


def _bad_reduce_op(context):
    strategy = context.fabric(strategy="ddp").strategy
    text = "`reduce_op='median'` is not a reduction. Choose one of avg, max, mean, min, product, sum."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        strategy.all_reduce(torch.ones(1), reduce_op="median")


def test_an_unknown_reduction():
    run_ranks(2, _bad_reduce_op)


def test_an_unbound_strategy_says_so():
    text = (
        "This `DDPStrategy` does not know its devices yet. Pass it to `Fabric(strategy=DDPStrategy(...))` before you"
        " use it."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        _ = DDPStrategy().world_size


def _padded(context):
    strategy = context.fabric(strategy="ddp").strategy
    rank = context.rank
    mine = torch.full((2 - rank, rank + 1), rank + 1.0, requires_grad=True)
    gathered = strategy.all_gather(mine, pad_value=-1, sync_grads=True)
    (gathered * (rank + 1)).sum().backward()
    return {
        "floats": gathered.tolist(),
        "gradient": mine.grad.tolist(),
        "bools": strategy.all_gather(torch.ones(rank, dtype=torch.bool), pad_value=0).tolist(),
        "alike": strategy.all_gather(torch.tensor(rank), pad_value=0).tolist(),
    }


def test_ragged_shapes_are_padded_on_request():
    gathered = [[[1, -1], [1, -1]], [[2, 2], [-1, -1]]]
    for rank, results in enumerate(run_ranks(2, _padded)):
        assert results["floats"] == gathered
        assert results["gradient"] == [[[3.0], [3.0]], [[3.0, 3.0]]][rank]
        assert results["bools"] == [[False], [True]]
        assert results["alike"] == [0, 1]


def _not_paddable(context):
    fabric = context.fabric(strategy="ddp")
    texts = []
    for tensor, pad_value in (
        (torch.zeros([1] * (context.rank + 1)), 0),
        (torch.zeros(context.rank, dtype=torch.uint8), -1),
        (torch.zeros(context.rank, dtype=torch.int64), 0.5),
    ):
        with pytest.raises(ValueError, match="pad_value") as raised:
            fabric.all_gather(tensor, pad_value=pad_value)
        texts.append(str(raised.value))
    fabric.barrier()
    return texts


def test_what_can_not_be_padded_is_told_on_every_rank():
    texts = [
        "`fabric.all_gather(..., pad_value=0)` needs tensors of one dtype and number of dimensions on all ranks, but"
        " got rank 0: float32 [1]; rank 1: float32 [1, 1]. Convert or reshape them first.",
        "`fabric.all_gather(..., pad_value=-1)`: a tensor of torch.uint8 can't hold this value."
        " Pass one that fits, or convert the tensor first.",
        "`fabric.all_gather(..., pad_value=0.5)`: a tensor of torch.int64 can't hold this value."
        " Pass one that fits, or convert the tensor first.",
    ]
    assert run_ranks(2, _not_paddable) == [texts, texts]


def _leaves_a_decision(context):
    strategy = context.fabric(strategy="ddp").strategy
    strategy.start_boolean_decision(True)()
    if context.rank == 0:
        time.sleep(0.5)
    decided = strategy.start_boolean_decision(context.rank == 1, all=False)
    if context.rank == 1:
        dist.destroy_process_group()  # as at the end of a script, where the strategy is still there
        return None
    return decided()


def test_leaving_the_group_waits_for_a_decision_under_way():
    assert run_ranks(2, _leaves_a_decision) == [True, None]
