# SPDX-License-Identifier: Apache-2.0
"""Saving while the loop goes on. Where a test needs a save to be under way, its file system waits to be let through."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from typing_extensions import override

from fabric import Fabric
from fabric.checkpoint.copies import Buffers, Copies
from tests.checkpoint.sharded import WORLD, Net, full_state, make, optimizer_for, same, train
from tests.ranks import RankContext, run_ranks

GATE = threading.Event()


class Gated(LocalFileSystem):
    """Local files that nobody can write to until the gate is open."""

    protocol = "gated"

    @classmethod
    @override
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(os.fspath(path).removeprefix("gated://"))

    @override
    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            GATE.wait()
        return super()._open(path, mode, **options)


fsspec.register_implementation("gated", Gated, clobber=True)

LAYOUTS = [("single", "full"), ("single", "sharded"), ("ddp", "full"), ("ours2", "full"), ("ours2", "sharded")]
LAYOUTS += [("single", "safetensors"), ("ddp", "safetensors"), ("ours2", "safetensors"), ("tp_fsdp", "safetensors")]


def texts(error: str) -> str:
    return f"^{re.escape(error)}$"


def error_of(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def one_process(path: Path) -> tuple[Fabric, Any, Any, dict[str, Any]]:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    net = Net(seed=1)
    net, optimizer = fabric.setup(net, optimizer_for(net, "adam"))
    train(net, optimizer, 0)
    return fabric, net, optimizer, {"net": net, "optimizer": optimizer, "step": 1}


# what is in it


def _save_and_go_on(context: RankContext, layout: str, type: str, path: str) -> tuple[Any, Any]:
    GATE.clear()
    options: Any = {"format": "safetensors"} if type == "safetensors" else {}
    fabric, net, optimizer = make(context, layout, "adam", seed=1, type="full" if options else type)
    train(net, optimizer, 0)
    history = [0.5, {"loss": torch.ones(3)}]
    state = {"net": net, "optimizer": optimizer, "history": history, "step": 1}
    fabric.save(f"{path}-blocking", state, **options)
    handle = fabric.save(f"gated://{path}", state, blocking=False, **options)
    was_done = handle.done()
    train(net, optimizer, 1)
    history[1]["loss"].zero_()
    history.append("later")
    state["step"] = 2
    GATE.set()
    handle.result()
    assert (was_done, handle.done()) == (False, True)
    expected = fabric.load(f"{path}-blocking")
    return fabric.load(path), expected


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.ranks
@pytest.mark.parametrize(("layout", "type"), LAYOUTS)
def test_what_the_loop_changes_meanwhile_is_not_in_it(layout: str, type: str, tmp_path: Path) -> None:
    for content, expected in run_ranks(WORLD[layout], _save_and_go_on, layout, type, str(tmp_path / "a")):
        assert content["step"] == 1
        assert len(content["history"]) == 2
        assert content["history"][0] == 0.5
        assert torch.equal(content["history"][1]["loss"], torch.ones(3))
        assert equal(content, expected)
        assert content["net"].keys() == Net(seed=1).state_dict().keys()
    assert sorted(os.listdir(tmp_path)) == ["a", "a-blocking"]


def _resume(context: RankContext, layout: str, path: str) -> dict[str, Any]:
    fabric, net, optimizer = make(context, layout, "adam", seed=1, type="sharded")
    train(net, optimizer, 0)
    handle = fabric.save(path, {"net": net, "optimizer": optimizer}, blocking=False)
    train(net, optimizer, 1)
    fabric.load(path, {"net": net, "optimizer": optimizer})  # waits for it
    assert handle.done()
    train(net, optimizer, 1)
    return full_state(net.module, optimizer) if fabric.world_size == 1 else {}


@pytest.mark.ranks
def test_loading_waits_for_it() -> None:
    (state,) = run_ranks(1, _resume, "single", "a")
    net = Net(seed=1)
    optimizer = optimizer_for(net, "adam")
    train(net, optimizer, 0)
    train(net, optimizer, 1)
    assert same(state, full_state(net, optimizer))


# copies


def test_memory_is_used_again() -> None:
    buffers = Buffers()
    state = {"a": torch.arange(6.0), "b": torch.arange(6.0).view(2, 3), "c": torch.arange(4.0)}
    first = Copies(buffers).of(state)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    assert len({*places.values(), *(tensor.data_ptr() for tensor in state.values())}) == 6
    state["a"] += 1
    del state["c"]
    second = Copies(buffers).of({**state, "d": torch.zeros(6)})
    assert {name: second[name].data_ptr() for name in ("a", "b")} == {name: places[name] for name in ("a", "b")}
    assert torch.equal(second["a"], torch.arange(6.0) + 1)
    assert second["d"].data_ptr() not in places.values()


def test_copies_are_what_was_copied(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    strided = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {
        "tied": [weight.detach(), weight.detach()],
        "parameter": weight,
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(3, requires_grad=True),
        "strided": strided,
        "part": strided[:, 1:2, ::2],
        "empty": [torch.empty(0, 3), torch.empty(0, 3)],
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "values": {"size": torch.Size([2]), "dtype": torch.int8, "device": torch.device("cpu"), "set": {1, 2}},
    }
    copied = Copies(Buffers()).of(state)
    torch.save(copied, tmp_path / "a")
    read = torch.load(tmp_path / "a")
    assert read["tied"][0].data_ptr() == read["tied"][1].data_ptr()
    assert type(read["parameter"]) is nn.Parameter
    assert [read[name].requires_grad for name in ("parameter", "frozen", "leaf", "part")] == [True, False, True, False]
    assert read["strided"].is_contiguous(memory_format=torch.channels_last)
    assert read["sparse"].layout == torch.sparse_coo
    assert torch.equal(read["sparse"].to_dense(), torch.eye(3))
    assert read["values"] == state["values"]
    for name in ("parameter", "frozen", "leaf", "strided", "part", "conjugate"):
        assert torch.equal(read[name], state[name])
    assert copied["values"]["set"] is not state["values"]["set"]


def test_copies_made_in_inference_mode_are_written_to_outside_of_it() -> None:
    strided = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    buffers = Buffers()
    for mode in (True, False, True):
        strided.add_(1)
        with torch.inference_mode(mode):
            copied = Copies(buffers).of({"strided": strided, "parameter": nn.Parameter(strided)})
        assert torch.equal(copied["strided"], strided)
        assert torch.equal(copied["parameter"], strided)


# one at a time


def _second(context: RankContext, path: str) -> tuple[Any, ...]:
    GATE.clear()
    fabric, _, _ = make(context, "ddp", "adam", seed=1)
    first = fabric.save(f"gated://{path}/first", {"step": 1}, blocking=False)
    refused = [error_of(fabric.save, f"{path}/x", {"step": 2}, busy="raise", blocking=b) for b in (True, False)]
    with pytest.raises(TimeoutError, match=texts(_not_written(path))):
        first.result(timeout=0)
    GATE.set()
    second = fabric.save(f"{path}/second", {"step": 2}, blocking=False)
    assert first.done()
    second.result()
    fabric.save(f"{path}/third", {"step": 3}, busy="raise")
    return refused, [fabric.load(f"{path}/{name}")["step"] for name in ("first", "second", "third")]


def _not_written(path: str) -> str:
    return f"`gated://{path}/first` is not written completely after 0 s, and writing goes on. Ask again later."


@pytest.mark.ranks
def test_a_second_one_waits_or_is_refused_on_all_ranks(tmp_path: Path) -> None:
    text = (
        f"`fabric.save(..., busy='raise')`: `gated://{tmp_path}/first` is still being written. Wait for the handle's"
        " `result()`, or leave out `busy`."
    )
    for refused, steps in run_ranks(2, _second, str(tmp_path)):
        assert refused == [("RuntimeError", text)] * 2
        assert steps == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"busy": "refuse"}, "`fabric.save(..., busy='refuse')` is unknown. Choose one of 'wait', 'raise'."),
        (
            {"blocking": False, "format": "safetensors", "max_shard_size": "many"},
            "`max_shard_size='many'` is no size. Write a number of bytes, or one as in `'5GB'`.",
        ),
    ],
)
def test_what_can_not_be(options: Any, text: str, tmp_path: Path) -> None:
    fabric, net, _, _ = one_process(tmp_path)
    with pytest.raises(ValueError, match=texts(text)):
        fabric.save(tmp_path / "a", {"net": net}, **options)


# errors


THROUGH_A_FILE = {
    "full": ("FileExistsError", "[Errno 17] File exists"),
    "sharded": ("NotADirectoryError", "[Errno 20] Not a directory"),
}


def _fail(context: RankContext, layout: str, type: str, path: str, heard: list[int], next_call: str) -> Any:
    fabric, net, _ = make(context, layout, "adam", seed=1, type=type)
    Path(path).write_text("a file") if fabric.global_rank == 0 else None
    fabric.barrier()
    handle = fabric.save(f"{path}/a", {"net": net}, blocking=False)
    handle.wait()
    errors = [error_of(handle.result)] if fabric.global_rank in heard else []
    calls = {"save": lambda: fabric.save(f"{path}-b", {"net": net}), "load": lambda: fabric.load(f"{path}-old")}
    errors.append(error_of(calls.get(next_call, fabric.teardown)))
    if next_call == "save":
        calls["save"]()
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize(("layout", "type"), [("ddp", "full"), ("ours2", "sharded")])
@pytest.mark.parametrize("heard", [[], [0], [1]])
def test_an_error_surfaces_at_the_next_call_on_all_ranks(
    heard: list[int], layout: str, type: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    expected = THROUGH_A_FILE[type][0], f"{THROUGH_A_FILE[type][1]}: '{path}/a'"
    ranks = run_ranks(2, _fail, layout, type, str(path), heard, "save")
    assert ranks == [[expected] * (2 if rank in heard else 1) for rank in range(2)]
    assert sorted(os.listdir(tmp_path)) == ["file", "file-b"]


@pytest.mark.ranks
@pytest.mark.parametrize("next_call", ["load", "teardown"])
def test_an_error_surfaces_when_loading_and_at_teardown(next_call: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    expected = THROUGH_A_FILE["full"][0], f"{THROUGH_A_FILE['full'][1]}: '{path}/a'"
    assert run_ranks(2, _fail, "ddp", "full", str(path), [], next_call) == [[expected]] * 2


@pytest.mark.ranks
def test_an_error_that_all_ranks_have_heard_is_over(tmp_path: Path) -> None:
    ranks = run_ranks(2, _fail, "ddp", "full", str(tmp_path / "file"), [0, 1], "save")
    assert [errors[1] for errors in ranks] == [("", "")] * 2


def _limited(context: RankContext, layout: str, type: str, path: str, failing: int) -> tuple[str, str]:
    """One rank may write 2 KB at most, as on a full disk."""
    import resource

    options: Any = {"format": "safetensors"} if type == "safetensors" else {}
    fabric, net, _ = make(context, layout, "adam", seed=1, type="full" if options else type)
    fabric.save(path, {"net": net, "step": 1}, **options)
    nn.init.zeros_(net.module.up.weight)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if fabric.global_rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        return error_of(fabric.save(path, {"net": net, "step": 2}, blocking=False, **options).result)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "type", "failing"), [("ddp", "full", 0), ("ours2", "sharded", 1), ("ours2", "safetensors", 0)]
)
def test_a_full_disk_leaves_the_old_one(layout: str, type: str, failing: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    text = f"[Errno 27] File too large: '{path}'"
    assert run_ranks(2, _limited, layout, type, str(path), failing) == [("OSError", text)] * 2
    assert os.listdir(tmp_path) == ["a"]
    fabric, net, _, _ = one_process(tmp_path)
    state = {"net": net, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 1
    assert same(net.state_dict(), Net(seed=1).state_dict())


# ends


SCRIPT = """
import sys, torch
from fabric import Fabric

path, devices, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
fabric = Fabric(accelerator="cpu", devices=devices)
state = {"values": torch.arange(1000.0)}
"""
ENDS = {
    "script": "fabric.launch()\nfabric.save(path, state, format=kind, blocking=False)\nstate['values'].zero_()\n",
    "function": (
        "def main(fabric):\n    fabric.save(path, state, format=kind, blocking=False)\n    state['values'].zero_()\n"
        "fabric.launch(main)\n"
    ),
}


def run_script(text: str, *args: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", SCRIPT + text, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["torch", "sharded"])
def test_the_end_waits_for_it(end: str, kind: str, tmp_path: Path) -> None:
    done = run_script(ENDS[end], tmp_path / "a", 1, kind)
    assert (done.returncode, done.stderr) == (0, "")
    fabric, *_ = one_process(tmp_path)
    assert torch.equal(fabric.load(tmp_path / "a")["values"], torch.arange(1000.0))


# Nobody has the `Fabric` any more, as where a function of the user's made it.
FAILING = "import atexit, gc\natexit.register(print, 'the end')\n" + ENDS["script"] + "del fabric\ngc.collect()\n"


def test_an_error_surfaces_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_script(FAILING, tmp_path / "file" / "a", 1, "torch")
    assert f"FileExistsError: [Errno 17] File exists: '{tmp_path}/file/a'" in done.stderr
    assert done.returncode == 1
    assert done.stdout == "the end\n"


@pytest.mark.ranks
def test_an_error_at_the_end_of_a_job_fails_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "main.py").write_text(SCRIPT + ENDS["script"])
    command = [sys.executable, str(tmp_path / "main.py"), str(tmp_path / "file" / "a"), "2", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert f"FileExistsError: [Errno 17] File exists: '{tmp_path}/file/a'" in done.stderr
    assert done.returncode == 1
