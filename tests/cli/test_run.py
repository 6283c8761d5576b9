# SPDX-License-Identifier: Apache-2.0
"""`fabric run`: what it passes on, what it starts, and what it says."""

import json
import os
import sys
from pathlib import Path

import pytest

from fabric.cli import main
from fabric.cli.run import _count_devices, _local_ranks, _threads
from tests.processes.jobs import Job, fabric_run, script
from tests.processes.test_supervision import ROOT

SCRIPT = """
import json, os, sys
names = [name for name in os.environ if name.startswith("FABRIC_") and name != "FABRIC_TEST_JOB"]
token = json.loads(os.environ.get("FABRIC_LAUNCH", "{}"))
own = {name: os.environ[name] for name in sorted(names) if name != "FABRIC_LAUNCH"}
seen = [sys.argv, own, token.get("world_size"), os.environ.get("OMP_NUM_THREADS"), "torch" in sys.modules]
with open(f"rank-{token.get('rank', 0)}.json", "w") as file:
    json.dump(seen, file)
if token.get("world_size"):
    os.close(token["port_fd"])
"""


def run(folder: Path, *words: str, **environ: str) -> Job:
    job = fabric_run(*words, folder=folder, environ={"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "", **environ})
    return job


def seen(folder: Path, rank: int = 0) -> list[object]:
    return json.loads((folder / f"rank-{rank}.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ([], {}),
        (["--precision", "bf16-mixed"], {"FABRIC_PRECISION": "bf16-mixed"}),
        (["--devices=auto", "--accelerator=cpu"], {"FABRIC_ACCELERATOR": "cpu", "FABRIC_DEVICES": "auto"}),
        (["--devices", "-1"], {"FABRIC_DEVICES": "-1"}),
        (["--debug", "--devices", "1"], {"FABRIC_DEBUG": "1", "FABRIC_DEVICES": "1"}),
        (["--devices", "2", "--strategy", "ddp_spawn"], {"FABRIC_DEVICES": "2", "FABRIC_STRATEGY": "ddp_spawn"}),
        (
            ["--num-nodes", "2", "--node-rank", "1", "--main-address", "h", "--main-port", "1", "--devices", "2"],
            {"FABRIC_DEVICES": "2", "FABRIC_MAIN_ADDRESS": "h", "FABRIC_MAIN_PORT": "1", "FABRIC_NODE_RANK": "1"}
            | {"FABRIC_NUM_NODES": "2"},
        ),
    ],
)
def test_passes_on_only_what_was_given(tmp_path: Path, words: list[str], variables: dict[str, str]) -> None:
    script(tmp_path, SCRIPT)
    assert run(tmp_path, *words, "main.py", "--devices", "7", "a b").wait() == 0
    assert seen(tmp_path) == [["main.py", "--devices", "7", "a b"], variables, None, None, False]


def test_a_module(tmp_path: Path) -> None:
    script(tmp_path / "package", SCRIPT, "train.py")
    assert run(tmp_path, "--precision", "64", "-m", "package.train", "-m", "a").wait() == 0
    argv = [str(tmp_path / "package" / "train.py"), "-m", "a"]
    assert seen(tmp_path) == [argv, {"FABRIC_PRECISION": "64"}, None, None, False]


@pytest.mark.ranks
def test_several_devices_start_at_once(tmp_path: Path) -> None:
    script(tmp_path, SCRIPT)
    assert run(tmp_path, "--devices", "0,2", "main.py", "a").wait() == 0
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in (0, 1):
        assert seen(tmp_path, rank) == [["main.py", "a"], {"FABRIC_DEVICES": "0,2"}, 2, threads, False]


def test_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    script(tmp_path, "import sys; sys.exit(3)")
    assert run(tmp_path, "main.py").wait() == 3
    assert run(tmp_path, "--devices", "2", "main.py").wait() == 3


def test_the_command_does_not_import_torch() -> None:
    code = "import sys, fabric.cli; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "which script? Write `fabric run [options] main.py [arguments]`, or `-m module`."),
        (["run", "--devices", "2"], "which script? Write `fabric run [options] main.py [arguments]`, or `-m module`."),
        (["run", "-m"], "which script? Write `fabric run [options] main.py [arguments]`, or `-m module`."),
        (["run", "nope.py"], "there is no file `nope.py` in `{cwd}`."),
        (["run", "--device", "2", "main.py"], "unrecognized arguments: --device"),
    ],
)
def test_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"fabric run: error: {message.format(cwd=os.getcwd())}"


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for option in ("accelerator", "strategy", "devices", "num-nodes", "node-rank", "main-address", "main-port"):
        assert f"--{option} " in shown
    assert "--precision NAME" in shown


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "run a script on the devices of this machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("devices", "count"),
    [("", 0), ("1", 1), ("2", 2), ("auto", 0), ("-1", 0), ("0,2", 2), ("[0, 2, 3]", 3), ("0,", 1), ("[4]", 1)],
)
def test_counts_devices(devices: str, count: int) -> None:
    assert _count_devices(devices) == count


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, None),
        ({"FABRIC_DEVICES": "1"}, None),
        ({"FABRIC_DEVICES": "2"}, 2),
        ({"FABRIC_DEVICES": "2", "FABRIC_STRATEGY": "ddp"}, 2),
        ({"FABRIC_DEVICES": "2", "FABRIC_STRATEGY": "ddp_fork"}, None),
        ({"FABRIC_DEVICES": "2", "FABRIC_STRATEGY": "ddp_notebook"}, None),
        ({"FABRIC_DEVICES": "2", "FABRIC_STRATEGY": "dp"}, None),
        ({"FABRIC_DEVICES": "2", "FABRIC_NUM_NODES": "1"}, 2),
        ({"FABRIC_DEVICES": "2", "FABRIC_NUM_NODES": "2"}, None),
        ({"FABRIC_DEVICES": "2", "RANK": "0"}, None),
        ({"FABRIC_DEVICES": "2", "MASTER_ADDR": "h"}, None),
        ({"FABRIC_DEVICES": "2", "SLURM_JOB_ID": "1"}, None),
    ],
)
def test_which_ranks_it_starts_itself(environ: dict[str, str], ranks: int | None) -> None:
    assert _local_ranks(environ) == ranks


def test_threads_are_shared_out() -> None:
    cores = len(os.sched_getaffinity(0))
    assert _threads(2, {}) == max(1, cores // 2)
    assert _threads(1000, {}) == 1
    assert _threads(2, {"OMP_NUM_THREADS": "5"}) is None
