# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models: what one layout saved, another one loads, and goes on as plain PyTorch does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.checkpoint.sharded import WORLD, Net, full_state, make, optimizer_for, plain, same, strategy_for, train
from tests.ranks import RankContext, run_ranks

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-6  # sums in another order
STEPS = 2


def _save(context: RankContext, path: str, layout: str, kind: str, type: str = "full") -> Any:
    fabric, net, optimizer = make(context, layout, kind, seed=1, type=type)
    for step in range(STEPS):
        train(net, optimizer, step)
    fabric.save(path, {"net": net, "optimizer": optimizer, "step": STEPS})
    return full_state(net.module, optimizer.optimizer)


def _load(context: RankContext, path: str, layout: str, kind: str, order: str, warm: bool) -> Any:
    """The state as loaded into fresh, or warmed up, objects, and after one more step."""
    fabric, net, optimizer = make(context, layout, kind, seed=2, order=order)
    if warm:
        train(net, optimizer, 77)
    kept = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {"net": net, "optimizer": optimizer, "step": 0}
    assert fabric.load(path, state) == {}
    assert state["step"] == STEPS
    assert all(a is b for a, b in zip(kept, (p for g in optimizer.param_groups for p in g["params"]), strict=True))
    assert all("param_names" not in group for group in optimizer.param_groups)
    loaded = full_state(net.module, optimizer.optimizer)
    train(net, optimizer, STEPS)
    return loaded, full_state(net.module, optimizer.optimizer)


def check_loaded(path: str, layout: str, kind: str, order: str = "two groups", warm: bool = False) -> None:
    results = run_ranks(WORLD[layout], _load, path, layout, kind, order, warm)
    before, after = full_state(*plain(kind, STEPS)), full_state(*plain(kind, STEPS + 1))
    for loaded, trained in results:
        assert same(loaded, before, TOLERANCE)
        assert same(trained, after, TOLERANCE)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("type", ["full", "sharded"])
def test_an_optimizer_in_another_order_finds_its_state_by_name(type: str, kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    run_ranks(2, _save, path, "fsdp2", kind, type)
    check_loaded(path, "fsdp2", kind, order="reversed")
    check_loaded(path, "single", kind, order="reversed")


class Rows(torch.optim.Optimizer):
    """Keeps one number for each row of a matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            square = parameter.grad.square().mean(-1, keepdim=True)
            rows = self.state[parameter].setdefault("rows", torch.zeros_like(square))
            rows.add_(square)
            parameter.sub_(0.1 * parameter.grad / (rows.sqrt() + 0.1))


def _rows(context: RankContext, path: str, type: str, how: str) -> Any:
    """Step twice; the second time after loading, or after sharding a net whose optimizer has stepped before."""
    fabric = context.fabric(strategy=strategy_for("ours2" if context.world_size == 2 else "single", type))
    net = Net(seed=2 if how.startswith("load") else 1)
    optimizer = Rows([p for p in net.parameters() if p.requires_grad and p.dim() == 2], {})
    if how == "set up":
        train(net, optimizer, 0)
    net_, optimizer_ = fabric.setup(net, optimizer)
    if how == "save":
        train(net_, optimizer_, 0)
        fabric.save(path, {"net": net_, "optimizer": optimizer_})
    if how == "load warm":
        train(net_, optimizer_, 77)
    if how.startswith("load"):
        fabric.load(path, {"net": net_, "optimizer": optimizer_})
    train(net_, optimizer_, 1)
    return full_state(net_.module, optimizer_.optimizer)


@pytest.mark.parametrize("type", ["full", "sharded"])
def test_state_of_another_shape_than_its_parameter_goes_on(type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    expected = run_ranks(1, _rows, path, type, "set up")[0]
    assert "rows of up.weight" in expected
    for ranks, how in [(1, "save"), (2, "load"), (2, "save"), (1, "load"), (2, "load"), (2, "load warm")]:
        for state in run_ranks(ranks, _rows, path, type, how):
            assert same(state, expected, TOLERANCE), (ranks, how)
    assert same(run_ranks(2, _rows, path, type, "set up")[1], expected, TOLERANCE)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_plain_pytorch_goes_on_from_a_full_file(kind: str, tmp_path: Path) -> None:
    run_ranks(4, _save, str(tmp_path / "a.pt"), "tp_fsdp", kind)
    content = torch.load(tmp_path / "a.pt")
    assert list(content) == ["net", "optimizer", "step"]
    assert content["net"]["head.weight"].data_ptr() == content["net"]["embedding.weight"].data_ptr()
    net = Net(seed=2)
    optimizer = optimizer_for(net, kind)
    net.load_state_dict(content["net"])
    optimizer.load_state_dict(content["optimizer"])
    names = [name for group in content["optimizer"]["param_groups"] for name in group.pop("param_names")]
    assert names[:2] == ["embedding.weight", "up.weight"]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    for group in optimizer.param_groups:
        del group["param_names"]
    train(net, optimizer, STEPS)
    assert same(full_state(net, optimizer), full_state(*plain(kind, STEPS + 1)), TOLERANCE)


def _save_pair(context: RankContext, path: str, layout: str, type: str, load: bool) -> Any:
    """One optimizer over two nets whose parameters have equal names."""
    fabric, first, _ = make(context, layout, "adam", seed=2 if load else 1, type=type)
    second = fabric.setup(Net(seed=4 if load else 3))
    nets = [second, first] if load else [first, second]
    parameters = [p for net in nets for p in net.parameters() if p.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.Adam(parameters, lr=0.1))
    state = {"nets": {"first": first, "second": second}, "optimizer": optimizer}
    if load:
        fabric.load(path, state)
    else:
        train(first, optimizer, 0)
        train(second, optimizer, 1)
        fabric.save(path, state)
    names = {id(p): name for key, net in state["nets"].items() for name, p in _named(key, net.module)}
    return {
        f"{entry} of {names[id(p)]}": torch.as_tensor(value.full_tensor() if hasattr(value, "full_tensor") else value)
        for p, entries in optimizer.state.items()
        for entry, value in entries.items()
    }


def _named(key: str, net: nn.Module) -> list[tuple[str, Any]]:
    return [(f"{key}.{name}", parameter) for name, parameter in net.named_parameters()]


@pytest.mark.parametrize("type", ["full", "sharded"])
def test_equal_names_in_one_optimizer_are_told_apart_by_their_module(type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    saved = run_ranks(2, _save_pair, path, "fsdp2", type, False)[0]
    assert {name.split(" of ")[1] for name in saved} >= {"first.up.weight", "second.up.weight"}
    assert not torch.equal(saved["exp_avg of first.up.weight"], saved["exp_avg of second.up.weight"])
    for layout in ("fsdp2", "single"):
        loaded = run_ranks(WORLD[layout], _save_pair, path, layout, type, True)[0]
        assert same(loaded, saved)


class Average:
    """Keeps a copy of a net's parameters, sharded as they are."""

    def __init__(self, net: nn.Module) -> None:
        self.copies = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"copies": dict(self.copies), "count": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["count"] == 3
        for name, copy in self.copies.items():
            copy.copy_(state_dict["copies"][name])


def _average(context: RankContext, path: str, layout: str, type: str, load: bool) -> Any:
    fabric, net, _ = make(context, layout, "sgd", seed=2 if load else 1, type=type)
    average = Average(net.module)
    if load:
        fabric.load(path, {"average": average, "net": net})
    else:
        fabric.save(path, {"average": average, "net": net})
    return {name: c.full_tensor() if hasattr(c, "full_tensor") else c for name, c in average.copies.items()}


@pytest.mark.parametrize("type", ["full", "sharded"])
def test_an_object_of_the_users_that_holds_shards(type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    run_ranks(2, _average, path, "fsdp2", type, False)
    expected = dict(Net(seed=1).named_parameters())
    for layout in ("fsdp2", "fsdp4", "single"):
        for copies in run_ranks(WORLD[layout], _average, path, layout, type, True):
            assert same(copies, expected)


def _copy_alone(context: RankContext, path: str, layout: str, type: str, load: bool) -> Any:
    fabric, net, _ = make(context, layout, "sgd", seed=2 if load else 1, type=type)
    copy = net.module.up.weight.detach().clone()
    state = {"copy": copy, "several": [copy]}
    fabric.load(path, state) if load else fabric.save(path, state)
    assert isinstance(state["copy"], DTensor)
    assert isinstance(state["several"][0], DTensor)
    return {"copy": state["copy"].full_tensor(), "several": state["several"][0].full_tensor()}


@pytest.mark.parametrize("type", ["full", "sharded"])
def test_shards_without_their_module_stay_shards(type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    saved = run_ranks(2, _copy_alone, path, "fsdp2", type, False)[0]
    assert same(run_ranks(2, _copy_alone, path, "fsdp2", type, True)[0], saved)


def _save_unlike(context: RankContext, path: str) -> tuple[str, str]:
    fabric, net, _ = make(context, "fsdp2", "sgd", seed=1)
    keep = {"net": lambda name, value: fabric.global_rank == 0 or name != "up.bias"}
    try:
        fabric.save(path, {"net": net}, filter=keep)
    except ValueError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_ranks_that_save_unlike_shards_are_told_at_once(tmp_path: Path) -> None:
    text = (
        '`fabric.save`: `state["net"]["up.bias"]` is a sharded tensor that rank 0 saves and rank 1 does not.'
        " Pass the same `state` and `filter` on all ranks."
    )
    assert run_ranks(2, _save_unlike, str(tmp_path / "a")) == [("ValueError", text)] * 2


class Other(nn.Module):
    """Has parameters that do not fit `Net`'s."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.head = nn.Linear(6, 11, bias=False, dtype=torch.complex64)
        self.heads = nn.Linear(2, 2, bias=False)


def _load_other(context: RankContext, path: str) -> tuple[str, str]:
    from torch.distributed.fsdp import fully_shard

    fabric = context.fabric()
    other = Other()
    fully_shard(other.up)
    before = [parameter.detach().clone() for parameter in other.parameters()]
    try:
        fabric.load(path, {"net": other})
    except RuntimeError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
        return type(error).__name__, re.sub(r"`.*/a`", "`a`", str(error))
    return "", ""


@pytest.mark.parametrize("type", ["full", "sharded"])
def test_differences_are_listed_before_anything_is_changed(type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    run_ranks(2, _save, path, "fsdp2", "sgd", type)
    text = """`a` does not match what is to be restored. Nothing was changed.
  missing     state["net"]: heads.weight (the nearest in the file is 'down.weight')
  unexpected  state["net"]: scale
  unexpected  state["net"]: embedding.weight (the nearest in the module is 'heads.weight')
  unexpected  state["net"]: frozen.weight (the nearest in the module is 'heads.weight')
  unexpected  state["net"]: frozen.bias
  unexpected  state["net"]: down.weight (the nearest in the module is 'heads.weight')
  unexpected  state["net"]: unused.weight (the nearest in the module is 'heads.weight')
  unexpected  state["net"]: unused.bias
  mismatched  state["net"]: up.weight: (8, 6) in the file, (9, 6) in the module
  mismatched  state["net"]: up.bias: (8,) in the file, (9,) in the module
  mismatched  state["net"]: head.weight: float32 in the file, complex64 in the module
To skip what is missing or unexpected, pass `strict=False`."""
    assert run_ranks(2, _load_other, path) == [("RuntimeError", text)] * 2


def _load_part(context: RankContext, path: str, layout: str) -> Any:
    fabric, net, _ = make(context, layout, "adam", seed=2)
    remainder = fabric.load(path, {"net": net})
    entry = remainder["optimizer"]["state"]
    return fabric.load(path)["net"], list(remainder), next(iter(entry.values()))["exp_avg"].device.type


@pytest.mark.parametrize(("type", "device"), [("full", "cpu"), ("sharded", "meta")])
def test_what_was_not_asked_for_is_not_read_from_a_folder(type: str, device: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    run_ranks(2, _save, path, "fsdp2", "adam", type)
    for everything, keys, seen in run_ranks(2, _load_part, path, "fsdp2"):
        assert sorted(keys) == ["optimizer", "step"]
        assert seen == device
        assert same(everything, dict(plain("adam", STEPS)[0].state_dict()), TOLERANCE)


def _random(context: RankContext, path: str, save: bool) -> Any:
    fabric, net, _ = make(context, "fsdp2", "sgd", seed=1, type="sharded")
    torch.manual_seed(100 * save + fabric.global_rank)
    if save:
        fabric.save(path, {"net": net, "fabric": fabric, "empty": {}, "of": ("a", 1), "by": {0: 1.0}})
    else:
        state = {"net": net, "fabric": fabric, "empty": {"x": 1}, "of": (), "by": {}}
        fabric.load(path, state, strict=False)
        assert (state["of"], state["by"]) == (("a", 1), {0: 1.0})
    return torch.rand(1).item()


def test_a_folder_keeps_each_ranks_random_numbers_and_plain_values_as_they_are(tmp_path: Path) -> None:
    drawn = run_ranks(2, _random, str(tmp_path / "a"), True)
    assert drawn[0] != drawn[1]
    assert run_ranks(2, _random, str(tmp_path / "a"), False) == drawn


def _load_raw(context: RankContext, path: str, layout: str) -> Any:
    fabric, net, optimizer = make(context, layout, "sgd", seed=2)
    fabric.load_raw(path, net)
    return full_state(net.module, optimizer.optimizer)


@pytest.mark.parametrize("layout", ["single", "fsdp2"])
def test_load_raw_finds_the_one_module_in_a_folder_and_takes_plain_files_apart(layout: str, tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path / "a"), "fsdp2", "sgd", "sharded")
    torch.save(plain("sgd", STEPS)[0].state_dict(), tmp_path / "b.pt")
    expected = full_state(*plain("sgd", STEPS))
    for name in ("a", "b.pt"):
        for state in run_ranks(WORLD[layout], _load_raw, str(tmp_path / name), layout):
            assert same(state, expected, TOLERANCE)
