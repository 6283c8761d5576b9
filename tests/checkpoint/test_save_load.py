# SPDX-License-Identifier: Apache-2.0
"""Saving and loading in one process. The ranks' side is in test_ranks.py."""

import copy
import re
from argparse import Namespace
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.checkpoint import load, load_raw, save
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.strategies import SingleDeviceStrategy
from fabric.utilities.data import AttributeDict

WITH: dict[str, Any] = {"access": SingleDeviceStrategy(), "io": TorchCheckpointIO()}


def net(fill: float = 0.0, width: int = 3) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1, bias=False))
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    return model


def trained(fill: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = net(fill)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    for _ in range(2):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Counts:
    """An object with a state of its own."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def texts(error: str) -> str:
    return f"^{re.escape(error)}$"


def test_everything_comes_back_in_place(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counts": Counts(3), "step": 7}
    save(tmp_path / "a.pt", state, **WITH)

    model2, optimizer2, scheduler2 = net(), None, None
    optimizer2 = torch.optim.AdamW(model2.named_parameters(), lr=0.5)
    scheduler2 = torch.optim.lr_scheduler.OneCycleLR(optimizer2, 1.0, total_steps=10)
    weight, counts = model2[0].weight, Counts()
    state2 = {"model": model2, "optimizer": optimizer2, "scheduler": scheduler2, "counts": counts, "step": 0}
    assert load(tmp_path / "a.pt", state2, **WITH) == {}
    assert state2["step"] == 7
    assert counts.count == 3
    assert state2["model"] is model2
    assert model2[0].weight is weight
    assert same(model2.state_dict(), model.state_dict())
    assert same(optimizer2.state_dict(), optimizer.state_dict())
    assert same(scheduler2.state_dict(), scheduler.state_dict())


def test_the_file_is_plain_pytorch(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    save(tmp_path / "a.pt", {"model": model, "optimizer": optimizer, "step": 7}, **WITH)
    content = torch.load(tmp_path / "a.pt")
    assert list(content) == ["model", "optimizer", "step"]
    net().load_state_dict(content["model"])
    assert same(content["optimizer"], optimizer.state_dict())
    assert content["optimizer"]["param_groups"][0]["param_names"][0] == "0.weight"


def test_without_a_state_everything_is_returned(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {"model": net(2.0), "step": 7}, **WITH)
    content = load(tmp_path / "a.pt", **WITH)
    assert same(content["model"], net(2.0).state_dict())
    assert content["step"] == 7


def test_what_is_not_asked_for_is_returned(tmp_path: Path) -> None:
    saved = {"model": net(), "step": 7, "nets": {"a": net(), "b": net(1.0), "note": "x"}, "lr": 0.1}
    save(tmp_path / "a.pt", saved, **WITH)
    state = {"step": 0, "nets": {"a": net(5.0)}}
    remainder = load(tmp_path / "a.pt", state, **WITH)
    assert list(remainder) == ["model", "lr", "nets"]
    assert same(remainder["nets"], {"b": net(1.0).state_dict(), "note": "x"})


def test_nested_objects_are_restored_in_place_and_never_pickled(tmp_path: Path) -> None:
    def make(fill: float, step: int) -> dict[str, Any]:
        nets = {"g": net(fill), "d": [net(fill + 1), (net(fill + 2), Counts(step))]}
        return {"nets": nets, "progress": {"step": step, "best": {"loss": fill}}, "history": [step] * step}

    save(tmp_path / "a.pt", make(1.0, 3), **WITH)
    assert "torch.nn.modules" not in (tmp_path / "a.pt").read_bytes().decode("latin1")
    state = make(0.0, 1)
    objects = [state["nets"]["g"], state["nets"]["d"], state["nets"]["d"][0], state["nets"]["d"][1][0]]
    progress, history = state["progress"], state["history"]
    assert load(tmp_path / "a.pt", state, **WITH) == {}
    expected = make(1.0, 3)
    assert same(objects[0].state_dict(), expected["nets"]["g"].state_dict())
    assert same(objects[2].state_dict(), expected["nets"]["d"][0].state_dict())
    assert same(objects[3].state_dict(), expected["nets"]["d"][1][0].state_dict())
    assert state["nets"]["d"] is objects[1]
    assert state["nets"]["d"][1][1].count == 3
    assert progress == {"step": 3, "best": {"loss": 1.0}}
    assert history == [3, 3, 3]
    assert state["progress"] is progress
    assert state["history"] is history


def test_dictionaries_of_plain_values_take_all_that_there_is(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {"history": {"loss": [1.0], "deep": {"x": 1}}}, **WITH)
    state: dict[str, Any] = {"history": {}}
    history = state["history"]
    assert load(tmp_path / "a.pt", state, **WITH) == {}
    assert history == {"loss": [1.0], "deep": {"x": 1}}


def test_plain_tensors_are_replaced_and_parameters_filled(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {"t": torch.ones(5), "p": nn.Parameter(torch.ones(2)), "tuple": (1, 2)}, **WITH)
    tensor, parameter = torch.zeros(3), nn.Parameter(torch.zeros(2))
    state = {"t": tensor, "p": parameter, "tuple": (0, 0)}
    load(tmp_path / "a.pt", state, **WITH)
    assert torch.equal(state["t"], torch.ones(5))
    assert torch.equal(tensor, torch.zeros(3))
    assert state["p"] is parameter
    assert torch.equal(parameter, torch.ones(2))
    assert state["tuple"] == (1, 2)


def test_filter_keeps_what_it_says(tmp_path: Path) -> None:
    state = {"model": net(), "step": 1}
    save(tmp_path / "a.pt", state, filter={"model": lambda name, value: name.endswith("weight")}, **WITH)
    content = load(tmp_path / "a.pt", **WITH)
    assert list(content["model"]) == ["0.weight", "1.weight", "2.weight"]
    assert content["step"] == 1


@pytest.mark.parametrize(
    ("filter", "kind", "text"),
    [
        (
            [1],
            TypeError,
            "`fabric.save(..., filter=[1])` takes a dictionary from keys of `state` to functions."
            " Write `filter={'model': lambda name, value: ...}`.",
        ),
        (
            {"modle": print},
            ValueError,
            "`fabric.save(..., filter=...)`: `state` has no key 'modle'."
            " Did you mean 'model'? Choose one of 'model', 'step'.",
        ),
        (
            {"model": 3},
            TypeError,
            "`fabric.save(..., filter={'model': 3})` takes a function of (name, value) for each key."
            " Write `filter={'model': lambda name, value: ...}`.",
        ),
        (
            {"step": print},
            TypeError,
            "`fabric.save(..., filter=...)`: `state['step']` is a `int`, which has no entries to choose from."
            " Leave it out of `filter`.",
        ),
    ],
)
def test_a_filter_that_can_not_be(filter: Any, kind: type[Exception], text: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=texts(text)):
        save(tmp_path / "a.pt", {"model": net(), "step": 1}, filter=filter, **WITH)
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**80,
        0.5,
        1j,
        "text",
        b"x",
        bytearray(b"x"),
        torch.Size([1, 2]),
        torch.bfloat16,
        torch.device("cpu"),
        torch.strided,
        torch.zeros(2),
        nn.Parameter(torch.zeros(2)),
        nn.Buffer(torch.zeros(2)),
        torch.zeros(2, dtype=torch.uint32),
        torch.zeros(2).to_sparse(),
        OrderedDict(a=1),
        Counter("aab"),
        {1, 2},
        (1, [2, {"a": None}]),
        torch.per_tensor_affine,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_be_saved_can_be_loaded_by_default(value: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {"value": value, "deep": [{"value": value}]}, **WITH)
    loaded = load(tmp_path / "a.pt", **WITH)["value"]
    assert type(loaded) is type(value)
    assert torch.equal(loaded.to_dense(), value.to_dense()) if isinstance(value, torch.Tensor) else loaded == value


def test_dictionaries_of_other_types_become_plain_ones(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", AttributeDict(step=3, inner=AttributeDict(x=1)), **WITH)
    assert load(tmp_path / "a.pt", **WITH) == {"step": 3, "inner": {"x": 1}}
    state = AttributeDict(step=0, inner=AttributeDict(x=0))
    load(tmp_path / "a.pt", state, **WITH)
    assert (state.step, state.inner.x) == (3, 1)


@pytest.mark.parametrize(
    ("state", "where", "name", "hint", "alone"),
    [
        ({"args": Namespace(lr=1)}, 'state["args"]', "argparse.Namespace", "", "Namespace"),
        (
            {"runs": [{"best": np.float64(0.5)}]},
            'state["runs"][0]["best"]',
            "numpy.float64",
            " (`.item()` of a NumPy number, `torch.from_numpy` of an array)",
            "float64",
        ),
        ({"f": Path}, 'state["f"]', "builtins.type", "", "type"),
        ({"s": {frozenset({1})}}, 'state["s"][0]', "builtins.frozenset", "", "frozenset"),
        ({"d": {Path("x"): 1}}, "", "pathlib.PosixPath", "", "PosixPath"),
        ({"o": object()}, 'state["o"]', "builtins.object", "", "object"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    state: dict[str, Any], where: str, name: str, hint: str, alone: str, tmp_path: Path
) -> None:
    where = where or "state[\"d\"] (the key PosixPath('x'))"
    text = (
        f"`fabric.save`: `{where}` is a `{name}`, which `fabric.load` refuses by default, since unpickling it could run"
        f" code. Save plain values in its place{hint}, give it `state_dict` and `load_state_dict`, or allow it in both"
        f" programs with `torch.serialization.add_safe_globals([{alone}])`."
    )
    with pytest.raises(TypeError, match=texts(text)):
        save(tmp_path / "a.pt", state, **WITH)
    assert not (tmp_path / "a.pt").exists()


def test_a_type_that_the_user_allows_is_saved_and_loaded(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Namespace]):
        save(tmp_path / "a.pt", {"args": Namespace(lr=1)}, **WITH)
        assert load(tmp_path / "a.pt", **WITH)["args"].lr == 1


def test_all_differences_are_listed_before_anything_is_changed(tmp_path: Path) -> None:
    saved = net(1.0)
    saved.add_module("head", nn.Linear(1, 1))
    optimizer = torch.optim.SGD(saved.parameters())
    save(tmp_path / "a.pt", {"model": saved, "optimizer": optimizer, "nets": [net()], "step": 3, "inner": 1}, **WITH)

    model = net(0.0, width=4)
    model.add_module("heads", nn.Linear(1, 1))
    before = copy.deepcopy(model.state_dict())
    state = {
        "step": 0,
        "model": model,
        "optimzer": Counts(),
        "optimizer": torch.optim.SGD(net().parameters()),
        "nets": [net(), net()],
        "inner": {"net": net()},
    }
    text = f"""\
`{tmp_path}/a.pt` does not match what is to be restored. Nothing was changed.
  missing     state["model"]: heads.weight (the nearest in the file is 'head.weight')
  missing     state["model"]: heads.bias (the nearest in the file is 'head.bias')
  unexpected  state["model"]: head.weight (the nearest in the module is 'heads.weight')
  unexpected  state["model"]: head.bias (the nearest in the module is 'heads.bias')
  mismatched  state["model"]: 0.weight: (3, 2) in the file, (4, 2) in the module
  mismatched  state["model"]: 0.bias: (3,) in the file, (4,) in the module
  mismatched  state["model"]: 1.weight: (3,) in the file, (4,) in the module
  mismatched  state["model"]: 1.bias: (3,) in the file, (4,) in the module
  mismatched  state["model"]: 1.running_mean: (3,) in the file, (4,) in the module
  mismatched  state["model"]: 1.running_var: (3,) in the file, (4,) in the module
  mismatched  state["model"]: 2.weight: (1, 3) in the file, (1, 4) in the module
  missing     state["optimzer"] (the nearest in the file is 'optimizer')
  mismatched  state["optimizer"]: groups of [7] parameters in the file, groups of [5] parameters in the optimizer
  mismatched  state["nets"]: 1 items in the file, 2 items in `state`
  mismatched  state["inner"]: a int in the file, a dict in `state`
To skip what is missing or unexpected, pass `strict=False`."""
    with pytest.raises(RuntimeError, match=texts(text)):
        load(tmp_path / "a.pt", state, **WITH)
    assert same(model.state_dict(), before)
    assert state["step"] == 0


def test_a_mismatch_alone_does_not_advise_strict(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {"p": nn.Parameter(torch.ones(2)), "model": 3, "optimizer": {"x": 1}}, **WITH)
    state = {"p": nn.Parameter(torch.ones(3)), "model": net(), "optimizer": torch.optim.SGD(net().parameters())}
    text = f"""\
`{tmp_path}/a.pt` does not match what is to be restored. Nothing was changed.
  mismatched  state["p"]: (2,) in the file, (3,) in `state`
  mismatched  state["model"]: a int in the file, needs a state dictionary
  mismatched  state["optimizer"]: the keys 'x' in the file, needs 'state' and 'param_groups'"""
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=texts(text)):
            load(tmp_path / "a.pt", state, strict=strict, **WITH)


def test_not_strict_restores_what_there_is(tmp_path: Path) -> None:
    saved = net(1.0)
    saved.add_module("head", nn.Linear(1, 1))
    save(tmp_path / "a.pt", {"model": saved}, **WITH)
    model = net()
    model.add_module("tail", nn.Linear(1, 1))
    state = {"model": model, "step": 5}
    assert load(tmp_path / "a.pt", state, strict=False, **WITH) == {}
    assert torch.equal(model[0].weight, saved[0].weight)
    assert state["step"] == 5


@pytest.mark.parametrize("saved_compiled", [True, False])
@pytest.mark.parametrize("loaded_compiled", [True, False])
def test_names_in_the_file_are_the_plain_models(saved_compiled: bool, loaded_compiled: bool, tmp_path: Path) -> None:
    def make(fill: float, compiled: bool) -> nn.Module:
        model = net(fill)
        if compiled:
            model[0] = torch.compile(model[0], backend="eager")
            model[1] = torch.compile(model[1], backend="eager")
        return model

    save(tmp_path / "a.pt", {"model": make(1.0, saved_compiled)}, **WITH)
    content = torch.load(tmp_path / "a.pt")["model"]
    assert list(content) == list(net().state_dict())
    assert content._metadata["1"] == {"version": 2}
    model = make(0.0, loaded_compiled)
    load(tmp_path / "a.pt", {"model": model}, **WITH)
    assert torch.equal(model[0].weight, net(1.0)[0].weight)


def test_a_file_with_wrapper_names_loads(tmp_path: Path) -> None:
    torch.save({f"_orig_mod.{name}": value for name, value in net(1.0).state_dict().items()}, tmp_path / "a.pt")
    model = net()
    load_raw(tmp_path / "a.pt", model, **WITH)
    assert torch.equal(model[0].weight, net(1.0)[0].weight)


class Renames(nn.Module):
    """Reads the names of an older version of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}old_{name}" in state_dict:
                state_dict[f"{prefix}new.{name}"] = state_dict.pop(f"{prefix}old_{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_modules_that_translate_old_names_are_let(tmp_path: Path) -> None:
    state = {"a.old_weight": torch.ones(2, 2), "a.old_bias": torch.ones(2), "b.weight": torch.ones(1, 1)}
    torch.save(state, tmp_path / "a.pt")
    model = nn.ModuleDict({"a": Renames(), "b": nn.Linear(1, 1, bias=False)})
    load_raw(tmp_path / "a.pt", model, **WITH)
    assert torch.equal(model["a"].new.weight, torch.ones(2, 2))


def test_an_old_batch_norm_loads(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    torch.save({k: v for k, v in model.state_dict().items() if k != "num_batches_tracked"}, tmp_path / "a.pt")
    load_raw(tmp_path / "a.pt", model, **WITH)


def test_lazy_modules_load(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "a.pt")
    model = nn.LazyLinear(2)
    load_raw(tmp_path / "a.pt", model, **WITH)
    assert model.weight.shape == (2, 3)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    saved, model = make(), make()
    save(tmp_path / "a.pt", {"model": saved}, **WITH)
    load(tmp_path / "a.pt", {"model": model}, **WITH)
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, saved[0].weight)


def test_load_raw(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    model2 = net()
    optimizer2 = torch.optim.AdamW(model2.named_parameters())
    load_raw(tmp_path / "model.pt", model2, **WITH)
    load_raw(tmp_path / "optimizer.pt", optimizer2, **WITH)
    assert same(model2.state_dict(), model.state_dict())
    assert same(optimizer2.state_dict(), optimizer.state_dict())
    assert load(tmp_path / "model.pt", net(), **WITH) == {}

    text = f"""\
`{tmp_path}/model.pt` does not match what is to be restored. Nothing was changed.
  missing     obj: weight (the nearest in the file is '2.weight')"""
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}"):
        load_raw(tmp_path / "model.pt", nn.Linear(1, 1, bias=False), **WITH)
    load_raw(tmp_path / "model.pt", nn.Linear(1, 1, bias=False), strict=False, **WITH)
    text = (
        "`fabric.load_raw(path, obj)` takes a module or an optimizer, but got `dict`."
        " For a dictionary of several objects call `fabric.load(path, state)`."
    )
    with pytest.raises(TypeError, match=texts(text)):
        load_raw(tmp_path / "model.pt", {"model": net()}, **WITH)


def test_files_and_states_that_are_no_dictionaries(tmp_path: Path) -> None:
    torch.save(torch.zeros(1), tmp_path / "a.pt")
    text = (
        f"`{tmp_path}/a.pt` holds a `Tensor` and not a dictionary, so it is no checkpoint. Read it with `torch.load`."
    )
    with pytest.raises(ValueError, match=texts(text)):
        load(tmp_path / "a.pt", {}, **WITH)
    save(tmp_path / "a.pt", {}, **WITH)
    text = (
        "`fabric.load(path, state)` takes a dictionary of names and objects, but got `list`."
        " Write `fabric.load(path, {'model': model, 'optimizer': optimizer})`."
    )
    with pytest.raises(TypeError, match=texts(text)):
        load(tmp_path / "a.pt", [net()], **WITH)


def test_an_error_of_the_users_object_is_raised_as_it_is(tmp_path: Path) -> None:
    class Broken(Counts):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("lost")

    broken = Broken()
    with pytest.raises(KeyError, match="lost"):
        save(tmp_path / "a.pt", {"a": broken}, **WITH)
    assert not (tmp_path / "a.pt").exists()


def test_a_plugin_of_the_users_is_asked(tmp_path: Path) -> None:
    class InMemory(CheckpointIO):
        def __init__(self) -> None:
            self.files: dict[Any, Any] = {}

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            self.files[path] = checkpoint

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool = True) -> Any:
            assert (map_location, weights_only) == ("cpu", False)
            return self.files[path]

        def remove_checkpoint(self, path: Any) -> None:
            del self.files[path]

    io = InMemory()
    save("a", {"step": 3}, access=WITH["access"], io=io)
    state = {"step": 0}
    load("a", state, access=WITH["access"], io=io, weights_only=False)
    assert state == {"step": 3}


def test_the_shapes_of_an_optimizers_state_are_compared(tmp_path: Path) -> None:
    def trained(size: int) -> torch.optim.Adam:
        net = nn.Linear(size, 1)
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(1, size)).sum().backward()
        optimizer.step()
        return optimizer

    path = tmp_path / "a.ckpt"
    save(path, {"optimizer": trained(2)}, **WITH)
    optimizer = trained(3)
    before = {key: value.clone() for key, value in optimizer.state_dict()["state"][0].items()}
    text = (
        f"`{path}` does not match what is to be restored. Nothing was changed.\n"
        '  mismatched  state["optimizer"]: exp_avg of parameter 0: (1, 2) in the file, (1, 3) of the parameter\n'
        '  mismatched  state["optimizer"]: exp_avg_sq of parameter 0: (1, 2) in the file, (1, 3) of the parameter'
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        load(path, {"optimizer": optimizer}, **WITH)
    assert all(torch.equal(optimizer.state_dict()["state"][0][key], value) for key, value in before.items())


def test_tensors_in_a_plain_list_go_to_the_device_of_those_that_they_replace(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, {"means": [torch.ones(2), 3]}, **WITH)
    state = {"means": [torch.zeros(2, device="meta"), 0]}
    load(path, state, **WITH)
    assert state["means"][0].device.type == "meta"
    assert state["means"][1] == 3


class Grows(nn.Module):
    """Its further state has another size with each call."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(size)))
        self.log = torch.arange(size)

    def get_extra_state(self) -> torch.Tensor:
        return self.log

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.log = state


class Versioned(nn.Module):
    """Translates what its former version has saved."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if (metadata.get("version") or 0) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 100
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


class Counting(torch.optim.SGD):
    """Has more in its state than parameter groups."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class LowRank(torch.optim.Optimizer):
    """Keeps something smaller than the parameter under a name that PyTorch's optimizers use too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = torch.ones(1, parameter.shape[-1])


@pytest.mark.parametrize("format", ["torch", "sharded", "safetensors"])
def test_objects_with_more_than_pytorch_lays_out(format: Any, tmp_path: Path) -> None:
    def make(size: int) -> dict[str, Any]:
        last = nn.Linear(3, 2)
        optimizers = [Counting(last.parameters(), lr=0.1, momentum=0.9), LowRank(last.parameters())]
        return {"net": nn.Sequential(Grows(size), Versioned(), last), "optimizers": optimizers}

    saved, state = make(3), make(2)
    saved["net"][2](torch.ones(1, 3)).sum().backward()
    for optimizer in saved["optimizers"]:
        optimizer.step()
    saved["optimizers"][0].count = 7
    save(tmp_path / "a", saved, format=format, **WITH)
    load(tmp_path / "a", state, **WITH)
    assert same(dict(state["net"].state_dict()), dict(saved["net"].state_dict()))
    for own, other in zip(state["optimizers"], saved["optimizers"], strict=True):
        assert same(own.state_dict(), other.state_dict())


@pytest.mark.parametrize("format", ["torch", "sharded"])
def test_parameters_in_a_list_are_filled(format: Any, tmp_path: Path) -> None:
    save(
        tmp_path / "a",
        {"scales": [nn.Parameter(torch.ones(2)), ({"x": nn.Parameter(torch.ones(1))}, 3)]},
        format=format,
        **WITH,
    )
    one, two = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    state: dict[str, Any] = {"scales": [one, ({"x": two}, 0)]}
    load(tmp_path / "a", state, **WITH)
    assert state["scales"][0] is one
    assert state["scales"][1][0]["x"] is two
    assert same([one, two, state["scales"][1][1]], [torch.ones(2), torch.ones(1), 3])


def test_items_of_plain_lists_take_the_place_of_others(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    content = {"history": [{"loss": 2}, {"loss": 3}], "pair": ({"new": 1}, 2)}
    fabric.save(tmp_path / "a.pt", content)
    state: dict[str, Any] = {"history": [{"old": 1}] * 2, "pair": ({"old": 1}, 0)}
    history = state["history"]
    fabric.load(tmp_path / "a.pt", state)
    assert state == content
    assert state["history"] is history
