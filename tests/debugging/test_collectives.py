# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.debugging.debug_checks import _COLLECTIVE
from fabric.debugging.record import name_ranks
from tests.debugging.jobs import debugged, error_of
from tests.ranks import RankContext, run_ranks

ORDER = (
    "\nAll ranks must make the same collective calls in the same order. Look for an `if` or a loop that not all of them"
    " take."
)
ALIKE = "\nPass tensors of the same shapes and dtypes, in the same order, and the same options."
LONGER = (
    "\nThey took another way, are stuck, or have ended. If they only need longer, set `FABRIC_DEBUG_TIMEOUT` to more"
    " seconds."
)


def different_calls(fabric: Fabric, rank: int) -> None:
    if rank == 0:
        fabric.barrier("epoch")
    else:
        fabric.all_reduce({"x": torch.ones(2, 3), "n": 1})


def different_places(fabric: Fabric, rank: int) -> None:
    if rank == 1:
        fabric.broadcast(1)
    else:
        fabric.broadcast(None)


def different_shapes(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce([torch.ones(2), torch.ones(2 if rank == 0 else 3, dtype=torch.float64)])


def different_lengths(fabric: Fabric, rank: int) -> None:
    fabric.all_gather([1.0] * (7 if rank else 1))


def different_dtypes(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(1 if rank == 0 else 1.0)


def different_options(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(torch.ones(1), reduce_op="sum" if rank == 0 else "mean")


def different_sources(fabric: Fabric, rank: int) -> None:
    fabric.broadcast(1, src=rank % 2)


def different_windows(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(8), batch_size=1))  # type: ignore[arg-type]
    for index, _ in enumerate(fabric.accumulate(loader, 1, count="samples")):
        if rank == 0 and index == 0:
            fabric.barrier()


def different_modules(fabric: Fabric, rank: int) -> None:
    fabric.setup(nn.Linear(2, 1 if rank == 0 else 2, bias=False))


def different_steps(fabric: Fabric, rank: int) -> None:
    model, optimizer = trained(fabric)
    fabric.backward(model(torch.ones(1, 2)).sum())
    if rank == 0:
        optimizer.step()
    else:
        fabric.any_rank(True)


def backward_on_some_ranks(fabric: Fabric, rank: int) -> None:
    model, _ = trained(fabric)
    loss = model(torch.ones(1, 2)).sum()
    if rank == 0:
        fabric.backward(loss)
    else:
        fabric.barrier()


EXPECTED = {
    different_calls: "RuntimeError: The ranks make different calls:\n"
    "  rank 0: `fabric.barrier` at +2 with name='epoch'\n"
    "  ranks 1-3: `fabric.all_reduce` at +4 with float32 [2, 3], int64 [], reduce_op='mean'" + ORDER,
    different_places: "RuntimeError: The ranks are at different places in `fabric.broadcast`:\n"
    "  ranks 0, 2-3: +4\n  rank 1: +2\nThey would take part in each other's collectives. Let all ranks reach the same"
    " line, or give each branch its values and make one call.",
    different_shapes: "RuntimeError: `fabric.all_reduce` at +1: what the ranks pass is not alike:\n"
    "  rank 0: float64 [2] (item 1)\n  ranks 1-3: float64 [3] (item 1)" + ALIKE,
    different_lengths: "RuntimeError: `fabric.all_gather` at +1: what the ranks pass is not alike:\n"
    "  rank 0: nothing (item 1), nothing (item 2), nothing (item 3), nothing (item 4), and 2 more\n"
    "  ranks 1-3: float32 [] (item 1), float32 [] (item 2), float32 [] (item 3), float32 [] (item 4), and 2 more"
    + ALIKE,
    different_dtypes: "RuntimeError: `fabric.all_reduce` at +1: what the ranks pass is not alike:\n"
    "  rank 0: int64 [] (item 0)\n  ranks 1-3: float32 [] (item 0)" + ALIKE,
    different_options: "RuntimeError: `fabric.all_reduce` at +1: what the ranks pass is not alike:\n"
    "  rank 0: reduce_op='sum' (item 1)\n  ranks 1-3: reduce_op='mean' (item 1)" + ALIKE,
    different_sources: "RuntimeError: `fabric.broadcast` at +1: what the ranks pass is not alike:\n"
    "  ranks 0, 2: src=0\n  ranks 1, 3: src=1" + ALIKE,
    different_windows: "RuntimeError: The ranks make different calls:\n"
    "  rank 0: `fabric.barrier` at +4\n  ranks 1-3: `fabric.accumulate` at +2" + ORDER,
    different_modules: "RuntimeError: `fabric.setup` at +1: what the ranks pass is not alike:\n"
    "  rank 0: float32 [1, 2]\n  ranks 1-3: float32 [2, 2]" + ALIKE,
    different_steps: "RuntimeError: The ranks make different calls:\n"
    "  rank 0: the parameters of `Linear` after step 1 of optimizer 0 at +4\n"
    "  ranks 1-3: `fabric.any_rank` at +6 with wait=True" + ORDER,
    backward_on_some_ranks: "RuntimeError: The ranks make different calls:\n"
    "  rank 0: `fabric.backward` at +4\n  ranks 1-3: `fabric.barrier` at +6" + ORDER,
}


def trained(fabric: Fabric) -> Any:
    net = nn.Linear(2, 1)
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


def all_cases(context: RankContext) -> dict[str, str]:
    fabric = debugged(context)
    return {case.__name__: error_of(case, fabric) for case in EXPECTED}


@pytest.mark.ranks
def test_every_rank_raises_the_same_error_with_each_ranks_call() -> None:
    expected = {case.__name__: text for case, text in EXPECTED.items()}
    for found in run_ranks(4, all_cases):
        assert found == expected


def late(fabric: Fabric, rank: int) -> None:
    dist.barrier()
    if rank != 1:
        try:
            fabric.barrier()
        finally:
            dist.barrier()
    else:
        dist.barrier()  # the others have given up
        fabric.broadcast(0)


def never(fabric: Fabric, rank: int) -> None:
    dist.barrier()
    if rank != 1:
        fabric.barrier()


def gone(fabric: Fabric, rank: int) -> None:
    dist.barrier()
    if rank == 1:
        fabric.teardown()
    else:
        fabric.barrier()


def failed(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(nn.Linear(1, 1))
    if rank == 1:
        model(torch.tensor([[float("nan")]]))
    fabric.barrier()


def missing_ranks(context: RankContext) -> list[str]:
    fabric = debugged(context, timeout=1)
    fabric.any_rank(False)
    return [error_of(case, fabric) for case in (late, never, gone)]


def failing_rank(context: RankContext) -> str:
    return error_of(failed, debugged(context))


@pytest.mark.ranks
def test_a_rank_that_does_not_come_is_named_on_those_that_wait() -> None:
    head = "RuntimeError: `fabric.barrier` at {}: rank 1 did not come within 1 seconds.\n  rank 1: last seen at {} at "
    results = run_ranks(3, missing_ranks)
    for found in (results[0], results[2]):
        assert found[0].startswith(head.format("+4", "`fabric.any_rank`"))
        assert found[0].endswith(LONGER)
        assert found[1].startswith(head.format("+3", "`fabric.broadcast`"))
        assert found[2] == "RuntimeError: `fabric.barrier` at +5: rank 1 will not come. It left the job at +3."
    assert results[1] == [results[0][0], "fine", "fine"]  # the one that came too late learns it as well


@pytest.mark.ranks
def test_the_others_learn_at_once_of_a_rank_that_found_nan() -> None:
    found = run_ranks(2, failing_rank)
    assert found[1].startswith(
        "FloatingPointError: `Linear` was given NaN: it is in the data.\n  input: float32 [1, 1]"
    )
    text = found[1].removeprefix("FloatingPointError: ")
    assert found[0] == f"RuntimeError: `fabric.barrier` at +4: rank 1 will not come. {text}"


def each_collective(context: RankContext) -> dict[str, str]:
    fabric = debugged(context)
    model, optimizer = trained(fabric)
    loader = DataLoader(torch.arange(4))  # type: ignore[arg-type]
    calls = {
        "barrier": lambda: fabric.barrier(),
        "broadcast": lambda: fabric.broadcast(1),
        "all_gather": lambda: fabric.all_gather(1),
        "all_reduce": lambda: fabric.all_reduce(1),
        "gather_for_metrics": lambda: fabric.gather_for_metrics(torch.ones(1), loader),
        "weighted_mean": lambda: fabric.weighted_mean(1.0, 1),
        "any_rank": lambda: fabric.any_rank(True),
        "all_ranks": lambda: fabric.all_ranks(True),
        "accumulate": lambda: fabric.accumulate(loader, 2),
        "join_uneven_inputs": lambda: fabric.join_uneven_inputs(model),
        "rank_zero_first": lambda: fabric.rank_zero_first(),
        "log_dict": lambda: fabric.log_dict({"loss": 1.0}, reduce="mean"),
        "save": lambda: fabric.save("file", {}),
        "load": lambda: fabric.load("file"),
        "load_raw": lambda: fabric.load_raw("file", model),
        "state_dict": lambda: fabric.state_dict(),
        "setup": lambda: fabric.setup(nn.Linear(1, 1)),
        "setup_module": lambda: fabric.setup_module(nn.Linear(1, 1)),
        "setup_optimizers": lambda: fabric.setup_optimizers(optimizer.optimizer),
        "setup_dataloaders": lambda: fabric.setup_dataloaders(loader),
    }
    assert calls.keys() == _COLLECTIVE
    found = {}
    for name, call in calls.items():
        try:
            if context.rank == 0:
                call()
            else:
                fabric.all_reduce(torch.ones(5))
        except RuntimeError as error:
            found[name] = str(error)
    fabric.barrier()
    return found


@pytest.mark.ranks
def test_each_collective_is_checked_before_anything_is_sent() -> None:
    first, second = run_ranks(2, each_collective)
    assert first == second
    assert first.keys() == _COLLECTIVE
    assert all(
        text.startswith(("The ranks make different calls:", "The ranks are at different")) for text in first.values()
    )
    assert all(f"rank 0: `fabric.{name}` at " in text for name, text in first.items() if name != "all_reduce")


def what_is_no_error(context: RankContext) -> Any:
    fabric = debugged(context)
    pair = dist.new_group([0, 1])
    others = dist.new_group([2, 3])
    own = pair if context.rank < 2 else others
    totals = [fabric.all_reduce(torch.tensor(float(context.rank)), group=own, reduce_op="sum").item()]
    if context.rank < 2:
        totals.append(fabric.all_reduce(1.0, group=pair).item())
    gathered = fabric.all_gather(torch.ones(context.rank + 1), pad_value=0.0)
    if context.rank == 0:  # what does not communicate is the business of one rank
        fabric.to_device(torch.ones(1))
        fabric.print("only here")
        fabric.log("x", 1.0)
    with fabric.rank_zero_first():
        pass
    objects = fabric.broadcast({"rank": context.rank}, src=2)
    for turn in range(20):
        assert fabric.any_rank(context.rank == turn % 4)
    fabric.teardown()
    return totals, list(gathered.shape), objects


@pytest.mark.ranks
def test_what_is_no_error_runs_as_ever(capfd: pytest.CaptureFixture[str]) -> None:
    results = run_ranks(4, what_is_no_error)
    assert [totals for totals, _, _ in results] == [[1.0, 1.0], [1.0, 1.0], [5.0], [5.0]]
    assert all((shape, objects) == ([4, 4], {"rank": 2}) for _, shape, objects in results)


def test_ranks_by_name() -> None:
    assert [name_ranks(ranks) for ranks in ([3], [0, 2, 3, 4], [5, 1])] == ["rank 3", "ranks 0, 2-4", "ranks 1, 5"]
