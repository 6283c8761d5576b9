# SPDX-License-Identifier: Apache-2.0
"""Saving and loading through `Fabric` on several ranks: of one mind, whatever happens to one of them."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from tests.ranks import RankContext, run_ranks

pytestmark = pytest.mark.ranks


def run(fabric: Any, directory: Path, stop: int | None, resume: bool) -> Any:
    """Train 16 steps with dropout and shuffling; returns losses from where it started, and the parameters."""
    torch.manual_seed(5 + fabric.global_rank if not resume else 77)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "fabric": fabric, "step": 0}
    if resume:
        assert fabric.load(directory / "a.pt", state) == {}
    losses = []
    while True:
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            state["step"] += 1
            if state["step"] == stop:
                fabric.save(directory / "a.pt", state)
            if state["step"] == 16:
                return losses, [p.detach().clone() for p in model.parameters()]


def _train(context: RankContext, directory: Path, stop: int | None, resume: bool) -> Any:
    return run(context.fabric(), directory, stop, resume)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stop", [3, 10])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(n: int, stop: int, tmp_path: Path) -> None:
    whole = run_ranks(n, _train, tmp_path, stop, False)
    resumed = run_ranks(n, _train, tmp_path, None, True)
    for (losses, parameters), (rest, resumed_parameters) in zip(whole, resumed, strict=True):
        assert rest == losses[stop:]
        assert all(map(torch.equal, parameters, resumed_parameters))


def test_nested_containers_of_the_users_are_restored_in_place(tmp_path: Path) -> None:
    def make(fill: float, step: int) -> tuple[Fabric, dict[str, Any]]:
        fabric = Fabric(accelerator="cpu", devices=1)
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, fill)
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=fill))
        return fabric, {"pair": (wrapped, step), "list": [optimizer, step], "history": [step] * step, "d": {"s": step}}

    fabric, saved = make(2.0, 3)
    fabric.save(tmp_path / "a.pt", saved)
    fabric, state = make(1.0, 1)
    model, inner_list, history, inner = state["pair"][0], state["list"], state["history"], state["d"]
    assert fabric.load(tmp_path / "a.pt", state) == {}
    assert state["pair"][0] is model
    assert model.weight.item() == 2.0
    assert state["pair"][1] == 3
    assert state["list"] is inner_list
    assert inner_list[1] == 3
    assert inner_list[0].param_groups[0]["lr"] == 2.0
    assert (history, inner) == ([3, 3, 3], {"s": 3})
    assert state["history"] is history


class Fails:
    """Has a state on every rank but one."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise LookupError("no state here")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.fails:
            raise LookupError("no state here")


class OddError(Exception):
    """Can't be pickled."""

    def __init__(self, text: str, more: int) -> None:
        super().__init__(text)


class FailsOddly(Fails):
    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise OddError("odd", 1)
        return {}


def _save(context: RankContext, path: str, failing: int | None = None, kind: str = "Fails") -> tuple[str, str]:
    """Type and text of the error that this rank sees. Fabric's own state is collective, and comes after the failure."""
    fabric = context.fabric()
    value = {"Fails": Fails, "FailsOddly": FailsOddly}[kind](fabric.global_rank == failing)
    try:
        fabric.save(path, {"value": value, "w": torch.zeros(1000), "fabric": fabric})
    except Exception as error:
        fabric.barrier()  # nobody has left the others behind
        return type(error).__name__, str(error)
    fabric.barrier()
    return "", ""


def _load(context: RankContext, path: str, state: Any, failing: int | None = None) -> tuple[str, str]:
    fabric = context.fabric()
    state = {**state, "value": Fails(fabric.global_rank == failing), "fabric": fabric}
    if isinstance(path, list):
        path = path[fabric.global_rank]
    try:
        fabric.load(path, state)
    except Exception as error:
        fabric.barrier()
        return type(error).__name__, str(error)
    return "", ""


def both(kind: str, text: str) -> list[tuple[str, str]]:
    return [(kind, text), (kind, text)]


def test_a_full_disk_is_seen_by_all() -> None:
    text = "[Errno 28] No space left on device: '/dev/full'"
    assert run_ranks(2, _save, "/dev/full") == both("OSError", text)


def test_a_path_through_a_file_is_seen_by_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    errors = run_ranks(2, _save, f"{tmp_path}/file/a.pt")
    assert errors[0] == errors[1]
    assert errors[0][0] in ("FileExistsError", "NotADirectoryError")
    assert f"{tmp_path}/file/a.pt" in errors[0][1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_that_one_rank_can_not_give_is_seen_by_all(failing: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_text("old")
    assert run_ranks(2, _save, str(path), failing) == both("LookupError", "no state here")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_that_can_not_travel_says_what_it_was(failing: int, tmp_path: Path) -> None:
    errors = run_ranks(2, _save, str(tmp_path / "a.pt"), failing, "FailsOddly")
    assert errors == both("RuntimeError", "OddError: odd")


def _cause(context: RankContext) -> str:
    fabric = context.fabric()
    try:
        fabric.save("a.pt", {"value": Fails(fabric.global_rank == 1)})
    except LookupError as error:
        return str(error.__cause__)
    return ""


def test_the_other_ranks_see_where_it_failed() -> None:
    seen = run_ranks(2, _cause)
    assert re.match(r"On rank 1:\nTraceback .*in state_dict\n.*LookupError: no state here", seen[0], re.DOTALL)
    assert seen[1] == "None"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_that_one_rank_can_not_take_is_seen_by_all(failing: int, tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    assert run_ranks(2, _save, path) == both("", "")
    assert run_ranks(2, _load, path, {}, failing) == both("LookupError", "no state here")


def test_files_that_can_not_be_read_are_seen_by_all(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pt")
    assert run_ranks(2, _load, missing, {}) == both(
        "FileNotFoundError", f"[Errno 2] No such file or directory: '{missing}'"
    )
    (tmp_path / "a.pt").write_text("text")
    errors = run_ranks(2, _load, str(tmp_path / "a.pt"), {})
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert errors[0][1].startswith(f"`{tmp_path}/a.pt` can't be read as a checkpoint.")


def test_the_path_of_rank_0_counts(tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    run_ranks(2, _save, path)
    assert run_ranks(2, _load, [path, "elsewhere.pt"], {}) == both("", "")


def test_a_mismatch_is_seen_by_all_before_anything_is_changed(tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    run_ranks(2, _save, path)
    errors = run_ranks(2, _load, path, {"step": 1})
    assert errors[0] == errors[1]
    assert errors[0] == (
        "RuntimeError",
        f"`{path}` does not match what is to be restored. Nothing was changed.\n"
        '  missing     state["step"]\nTo skip what is missing or unexpected, pass `strict=False`.',
    )


def _random(context: RankContext, path: str, save: bool) -> Any:
    fabric = context.fabric()
    torch.manual_seed(100 * save + fabric.global_rank)
    if save:
        fabric.save(path, {"fabric": fabric})
    else:
        fabric.load(path, {"fabric": fabric})
    return torch.rand(1).item()


def test_each_rank_gets_its_own_random_numbers_back(tmp_path: Path) -> None:
    drawn = run_ranks(2, _random, str(tmp_path / "a.pt"), True)
    assert drawn[0] != drawn[1]
    assert run_ranks(2, _random, str(tmp_path / "a.pt"), False) == drawn


class Unreadable(Fails):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error", "a.pt")


class OddlyUnreadable(Fails):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.fails:
            raise OddError("odd", 1)


def _load_in_part(context: RankContext, path: str, kind: str) -> Any:
    fabric = context.fabric()
    fails = {"Unreadable": Unreadable, "OddlyUnreadable": OddlyUnreadable}[kind](fabric.global_rank == 1)
    state: dict[str, Any] = {"before": [torch.zeros(2)], "value": fails, "after": torch.zeros(2), "n": {"a": 0}}
    try:
        fabric.load(path, state)
    except (OSError, RuntimeError) as error:
        return type(error), str(error), error.__notes__, state["after"].tolist()


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("Unreadable", OSError, "[Errno 5] Input/output error: 'a.pt'"),
        ("OddlyUnreadable", RuntimeError, "OddError: odd"),
    ],
)
def test_an_error_while_restoring_says_what_was_restored(kind: str, error: type, text: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    torch.save({"before": [torch.ones(2)], "value": {}, "after": torch.ones(2), "n": {"a": 1}}, path)
    note = (
        'Restored from it: state["before"], state["after"], state["n"]["a"], state["n"]. Not, or only in part:'
        ' state["value"]. Load a whole checkpoint into these objects before you go on.'
    )
    assert run_ranks(2, _load_in_part, path, kind) == [(error, text, [note], [1.0, 1.0])] * 2


def _load_callback(context: RankContext, path: str, failing: int) -> tuple[str, str]:
    callback = Fails(False)
    fabric = context.fabric(callbacks=[callback])
    fabric.save(path, {"fabric": fabric})
    callback.fails = fabric.global_rank == failing
    error: Any = None
    try:
        fabric.load(path, {"fabric": fabric})
    except Exception as caught:
        error = caught
    fabric.barrier()  # nobody has left the others behind
    return type(error).__name__, str(error)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_callback_that_one_rank_can_not_restore_is_seen_by_all(failing: int, tmp_path: Path) -> None:
    """Fabric's own state is collective."""
    found = run_ranks(2, _load_callback, str(tmp_path / "a.pt"), failing)
    assert found == [("LookupError", "no state here")] * 2
