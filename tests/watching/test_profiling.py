# SPDX-License-Identifier: Apache-2.0
import contextlib
import gzip
import io
import json
import re

import fsspec
import pytest
import torch

from fabric import Fabric
from tests.ranks import run_ranks


def _names(path):
    """The names in a trace."""
    open_ = gzip.open if path.suffix == ".gz" else open
    with open_(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


def _products(profile, steps):
    for _ in range(steps):
        torch.ones(4, 4) @ torch.ones(4, 4)
        profile.step()


def test_without_a_schedule_all_is_recorded(tmp_path, capsys) -> None:
    fabric = Fabric(accelerator="cpu")
    with fabric.profile(tmp_path / "traces", record_shapes=True, rows=3):
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert [file.name for file in (tmp_path / "traces").iterdir()] == ["rank0.json"]
    assert "aten::mm" in _names(tmp_path / "traces" / "rank0.json")
    printed = capsys.readouterr().out
    assert "Self CPU time total" in printed
    assert printed.splitlines()[-2:] == [
        "No time went into communication.",
        f"Traces: `{tmp_path}/traces/rank*.json`",
    ]


def test_cycles_of_a_schedule(tmp_path, capsys) -> None:
    fabric = Fabric(accelerator="cpu")
    with fabric.profile(tmp_path, wait=1, active=2, repeat=2, compress=True) as profile:
        _products(profile, 9)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0-cycle1.json.gz", "rank0.json.gz"]
    for file, steps in (("rank0.json.gz", (2, 3)), ("rank0-cycle1.json.gz", (6, 7))):
        names = _names(tmp_path / file)
        assert {name for name in names if name.startswith("ProfilerStep")} == {f"ProfilerStep#{n}" for n in steps}
        assert names.count("aten::mm") == 2
    assert capsys.readouterr().out.count("Self CPU time total") == 1


def test_an_early_end_writes_what_there_is(tmp_path, capsys) -> None:
    fabric = Fabric(accelerator="cpu")
    with fabric.profile(tmp_path / "break", active=5) as profile:
        for step in range(10):
            _products(profile, 1)
            if step == 2:
                break
    assert _names(tmp_path / "break" / "rank0.json").count("aten::mm") == 2
    assert "Self CPU time total" in capsys.readouterr().out
    profile = fabric.profile(tmp_path / "error", active=5)
    with pytest.raises(ValueError, match=r"^mine$"), profile:  # noqa: PT012
        _products(profile, 4)
        raise ValueError("mine")
    assert _names(tmp_path / "error" / "rank0.json").count("aten::mm") == 3
    assert capsys.readouterr().out == ""


def test_an_end_before_the_recording_says_so(tmp_path, capsys) -> None:
    with Fabric(accelerator="cpu").profile(tmp_path, skip_first=1, wait=2, active=5) as profile:
        _products(profile, 3)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == (
        f"`fabric.profile('{tmp_path}')` recorded nothing: `step()` was called 3 times, and recording starts after 4"
        " steps (`skip_first` + `wait` + `warmup`).\n"
    )


def test_a_remote_folder() -> None:
    with Fabric(accelerator="cpu").profile("memory://traces/run"):
        torch.ones(4, 4) @ torch.ones(4, 4)
    memory = fsspec.filesystem("memory")
    assert [path.rpartition("/")[2] for path in memory.ls("/traces/run", detail=False)] == ["rank0.json"]
    assert b"aten::mm" in memory.cat("/traces/run/rank0.json")
    memory.rm("/traces", recursive=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active": 0}, "`fabric.profile(active=0)` is too small. Write 1 or more."),
        ({"wait": -1, "active": 1}, "`fabric.profile(wait=-1)` is too small. Write 0 or more."),
        (
            {"warmup": 2},
            "`fabric.profile(warmup=2)` has no meaning without `active`, the number of steps to record."
            " Give it too, and call `step()` at the end of each step.",
        ),
        (
            {"repeat": 2},
            "`fabric.profile(repeat=2)` has no meaning without `active`, the number of steps to record."
            " Give it too, and call `step()` at the end of each step.",
        ),
    ],
)
def test_steps_that_do_not_fit(options, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Fabric(accelerator="cpu").profile("unused", **options)


def _train(context):
    fabric = context.fabric(strategy="ddp")
    model = fabric.setup(torch.nn.Linear(8, 8))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), fabric.profile(context.directory / "traces", active=2) as profile:
        for _ in range(3):
            fabric.backward(model(torch.ones(2, 8)).sum())
            fabric.barrier()
            profile.step()
    fabric.barrier()
    names = sorted(file.name for file in (context.directory / "traces").iterdir())
    counts = [_names(context.directory / "traces" / f"rank{rank}.json").count("gloo:all_reduce") for rank in (0, 1)]
    return printed.getvalue(), names, counts


def _can_not_write(context):
    fabric = context.fabric()
    if context.rank == 1:
        (context.directory / "file").write_text("")
    fabric.barrier()
    folder = context.directory / ("file" if context.rank == 1 else "folder")
    with pytest.raises(RuntimeError) as raised, fabric.profile(folder):
        pass
    return str(raised.value).replace(str(context.directory), "DIR")


def _profile_on_ranks(context):
    return _train(context), _can_not_write(context)


@pytest.mark.ranks
def test_each_rank_writes_and_rank_zero_tells_of_all() -> None:
    (first, first_error), (second, second_error) = run_ranks(2, _profile_on_ranks)
    assert first[1:] == second[1:] == (["rank0.json", "rank1.json"], [2, 2])
    assert second[0] == ""
    lines = first[0].splitlines()
    start = lines.index("Time in communication, and that in which nothing else was done:")
    assert lines[start + 1].split() == ["rank", "steps", "recorded", "collectives", "nothing", "else", "share"]
    assert [line.split()[:2] for line in lines[start + 2 : start + 4]] == [["0", "2"], ["1", "2"]]
    assert re.search(r"^  gloo:all_reduce: 2 calls, [0-9.]+ ms \(rank 0\)$", first[0], re.MULTILINE)
    assert re.search(r"^  gloo:barrier: 2 calls, [0-9.]+ ms \(rank 0\)$", first[0], re.MULTILINE)
    for error, name in ((first_error, "folder"), (second_error, "file")):
        reason = "FileExistsError: [Errno 17] File exists: 'DIR/file'"
        assert error == f"`fabric.profile('DIR/{name}')`: rank 1 could not write: {reason}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_are_recorded_on_a_gpu(tmp_path, capsys) -> None:
    fabric = Fabric(accelerator="cuda", devices=1)
    with fabric.profile(tmp_path, active=1) as profile:
        for _ in range(2):
            torch.ones(64, 64, device=fabric.device) @ torch.ones(64, 64, device=fabric.device)
            profile.step()
    assert any("gemm" in name for name in _names(tmp_path / "rank0.json"))
    assert "CUDA time total" in capsys.readouterr().out
