# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold different parameters: what they save is the whole model's, and each takes its own of that again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from fabric.strategies import ParallelStrategy
from tests.checkpoint.sharded import same
from tests.ranks import RankContext, run_ranks

pytestmark = pytest.mark.ranks


class Whole(nn.Module):
    """Three parts, of which each rank has some: rank 0 the first and third, rank 1 the second."""

    def __init__(self, seed: int, only: str = "first second third") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            parts = {
                "first": nn.Sequential(nn.Linear(3, 4)),
                "second": nn.BatchNorm1d(4),
                "third": nn.Linear(4, 2, bias=False),
            }
            nn.init.normal_(parts["second"].weight)  # type: ignore[arg-type]
        for name in only.split():
            self.add_module(name, parts[name])


ONLY = ("first third", "second")


class Stages(ParallelStrategy):
    """Each rank has its own parts, under the whole model's names.

    Args:
        state_dict_type: `full` or `sharded`.
    """

    state_is_distributed = True

    def __init__(self, state_dict_type: Any) -> None:
        super().__init__()
        self.state_dict_type = state_dict_type

    @override
    def in_plain_order(self, names: list[str]) -> list[str]:
        return [name for name in Whole(0).state_dict() if name in names]


def optimizer_for(net: nn.Module) -> torch.optim.Optimizer:
    named = list(net.named_parameters())
    groups = [[p for name, p in named if "bias" in name], [p for name, p in named if "bias" not in name]]
    return torch.optim.Adam([{"params": groups[0], "lr": 0.1}, {"params": groups[1]}], lr=0.2)


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients that depend on the parameter alone, so that each part can be trained without the others."""
    sum((parameter**2).sum() for parameter in net.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = dict(net.state_dict())
    for name, parameter in net.named_parameters():
        state |= {f"{entry} of {name}": value for entry, value in optimizer.state[parameter].items()}
    return {name: value.clone() for name, value in state.items()}


def _save(context: RankContext, path: str, type: str) -> None:
    fabric = context.fabric(strategy=Stages(type))
    net = Whole(1, ONLY[fabric.global_rank])
    optimizer = optimizer_for(net)
    net, optimizer = fabric.setup(net, optimizer)
    train(net, optimizer)
    fabric.save(path, {"net": net, "optimizer": optimizer, "step": [3, fabric.global_rank]})


def _load(context: RankContext, path: str, only: bool) -> dict[str, Any]:
    fabric = context.fabric(strategy=Stages("full")) if only else context.fabric()
    net = Whole(2, ONLY[fabric.global_rank] if only else "first second third")
    optimizer = optimizer_for(net)
    net, optimizer = fabric.setup(net, optimizer)
    state: dict[str, Any] = {"net": net, "optimizer": optimizer, "step": []}
    assert fabric.load(path, state) == {}
    assert state["step"] == [3, 0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    train(net, optimizer)
    return state_of(net.module, optimizer.optimizer)


def plain(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = Whole(1)
    optimizer = optimizer_for(net)
    for _ in range(steps):
        train(net, optimizer)
    return net, optimizer


def part_of(state: Mapping[str, Any], only: str) -> dict[str, Any]:
    parts = tuple(f"{name}." for name in only.split())
    return {name: value for name, value in state.items() if name.rpartition(" of ")[2].startswith(parts)}


@pytest.mark.parametrize("type", ["full", "sharded"])
def test_the_stages_save_the_whole_and_each_loads_its_own(type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    run_ranks(2, _save, path, type)
    expected = state_of(*plain(2))
    for only, state in zip(ONLY, run_ranks(2, _load, path, True), strict=True):
        assert same(state, part_of(expected, only))
    assert same(run_ranks(1, _load, path, False)[0], expected)


def test_the_full_file_is_the_plain_models(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path / "a"), "full")
    content = torch.load(tmp_path / "a")
    net, optimizer = plain(1)
    assert list(content["net"]) == list(net.state_dict())
    assert same(content["net"], net.state_dict())
    assert dict(content["net"]._metadata) == dict(net.state_dict()._metadata)
    own = optimizer.state_dict()
    assert [group["params"] for group in content["optimizer"]["param_groups"]] == [[0, 1], [2, 3, 4]]
    for number, entries in own["state"].items():
        assert same(content["optimizer"]["state"][number], entries)


def _save_unnamed(context: RankContext, path: str) -> tuple[str, str]:
    fabric = context.fabric(strategy=Stages("full"))
    optimizer = optimizer_for(Whole(1, ONLY[fabric.global_rank]))
    try:
        fabric.save(path, {"optimizer": optimizer})
    except ValueError as error:
        return type_and_text(error)
    return "", ""


def test_an_optimizer_without_names_can_not_be_put_together(tmp_path: Path) -> None:
    text = (
        "`fabric.save`: each rank holds other parameters of this `Adam`, and their names are not known."
        " Put the module that they belong to into `state` too."
    )
    assert run_ranks(2, _save_unnamed, str(tmp_path / "a")) == [("ValueError", text)] * 2


def _save_unlike(context: RankContext, path: str, type: str) -> tuple[str, str]:
    fabric = context.fabric(strategy=Stages(type))
    net = Whole(1, ONLY[fabric.global_rank])
    optimizer = optimizer_for(net)
    if fabric.global_rank == 1:
        optimizer = torch.optim.Adam(net.parameters())
    try:
        fabric.save(path, {"net": net, "optimizer": optimizer})
    except ValueError as error:
        return type_and_text(error)
    return "", ""


def type_and_text(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


@pytest.mark.parametrize("type", ["full", "sharded"])
def test_other_groups_on_each_rank_can_not_be_put_together(type: str, tmp_path: Path) -> None:
    text = (
        "`fabric.save`: an optimizer has 2, 1 parameter groups on the ranks."
        " Give it the same groups on all ranks; one may be empty."
    )
    assert run_ranks(2, _save_unlike, str(tmp_path / "a"), type) == [("ValueError", text)] * 2
    assert list(tmp_path.iterdir()) == []


def _load_unnamed(context: RankContext, path: str) -> tuple[str, str]:
    fabric = context.fabric(strategy=Stages("full"))
    net = Whole(2, ONLY[fabric.global_rank])
    optimizer = optimizer_for(net)
    try:
        fabric.load(path, {"net": net, "optimizer": optimizer})
    except RuntimeError as error:
        return type_and_text(error)
    return "", ""


def test_a_file_without_names_can_not_be_divided_and_unexpected_names_are_those_of_no_rank(tmp_path: Path) -> None:
    net, optimizer = plain(1)
    state = {**net.state_dict(), "fourth": torch.zeros(1)}
    torch.save({"net": state, "optimizer": optimizer.state_dict()}, tmp_path / "a")
    text = (
        f"`{tmp_path}/a` does not match what is to be restored. Nothing was changed.\n"
        '  unexpected  state["net"]: fourth\n'
        '  mismatched  state["optimizer"]: parameters without these names in the file,'
        " other parameters on each rank\n"
        "To skip what is missing or unexpected, pass `strict=False`."
    )
    assert run_ranks(2, _load_unnamed, str(tmp_path / "a")) == [("RuntimeError", text)] * 2


def _save_filtered(context: RankContext, path: str, type: str) -> list[str]:
    fabric = context.fabric(strategy=Stages(type))
    net = fabric.setup(Whole(seed=context.rank, only=ONLY[context.rank]))
    fabric.save(path, {"net": net}, filter={"net": lambda name, value: name.startswith("second")})
    fabric.save(f"{path} of nothing", {"net": net}, filter={"net": lambda name, value: False})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(7.0)
    fabric.load(f"{path} of nothing", {"net": net}, strict=False)
    fabric.load(path, {"net": net}, strict=False)
    return [name for name, parameter in net.named_parameters() if bool((parameter == 7.0).all())]


@pytest.mark.parametrize("type", ["sharded", "full"])
def test_a_filter_may_leave_a_rank_with_nothing(type: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _save_filtered, str(tmp_path / "saved"), type)
    assert first == ["first.0.weight", "first.0.bias", "third.weight"]
    assert second == []


def _save_average(context: RankContext, path: str, type: str) -> tuple[str, str]:
    fabric = context.fabric(strategy=Stages(type))
    net = fabric.setup(Whole(seed=1, only=ONLY[context.rank]))
    more = {"a": torch.zeros(2), "b": torch.zeros(2), "n": context.rank}
    fabric.save(path, {"net": net, "more": more if context.rank else dict(reversed(more.items()))})
    try:
        fabric.save(path, {"net": net, "average": dict(net.state_dict())})
    except Exception as error:
        return type_and_text(error)
    return "", ""


@pytest.mark.parametrize("type", ["sharded", "full"])
def test_tensors_that_one_rank_has_beside_its_modules_are_not_lost_in_silence(type: str, tmp_path: Path) -> None:
    text = (
        '`fabric.save`: `state["average"]["first.0.bias"]` is a tensor on rank 0 and not on rank 1. Of plain values'
        " only those of rank 0 are written. Keep what each rank has of its own in a module that is set up too, such as"
        " a copy of the model that was made before: `average = fabric.setup(copy.deepcopy(model))`."
    )
    assert run_ranks(2, _save_average, str(tmp_path / "saved"), type) == [("ValueError", text)] * 2
