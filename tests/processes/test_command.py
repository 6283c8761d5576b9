# SPDX-License-Identifier: Apache-2.0
"""The command that starts the program again."""

import json
import os
import sys
from pathlib import Path

import pytest

from fabric.processes.command import Command, Program, rebuild_command
from tests.processes.jobs import python, script
from tests.processes.test_supervision import ROOT

REFUSAL = (
    "`fabric.launch()` starts the other ranks by running this program again, but it {why}, which cannot be run again."
    ' Run a file, `python main.py`, or pass a function: `Fabric(strategy="ddp_spawn").launch(fn)`.'
)

HASHES = "--check-hash-based-pycs"


def program(folder: Path, *original: str, file: str | None = None, module: str | None = None) -> Program:
    """A program that was started in `folder` by the words `original`."""
    return Program(
        executable="/bin/python",
        original=("python", *original),
        script=file or "",
        file=None if file is None else str(folder / file),
        module=module,
        directory=str(folder),
    )


@pytest.mark.parametrize(
    ("original", "file", "module", "expected"),
    [
        (["main.py"], "main.py", None, ["main.py"]),
        (["main.py", "--lr", "1"], "main.py", None, ["main.py", "--lr", "1"]),
        (["main.py", "-m", "-c"], "main.py", None, ["main.py", "-m", "-c"]),
        (["-O", "-Xdev", "-W", "a", "-u", "main.py"], "main.py", None, ["-O", "-X", "dev", "-W", "a", "-u", "main.py"]),
        (["-OuX", "dev", "main.py"], "main.py", None, ["-Ou", "-X", "dev", "main.py"]),
        (["-i", "main.py"], "main.py", None, ["main.py"]),
        (["-Oi", "main.py"], "main.py", None, ["-O", "main.py"]),
        ([HASHES, "always", "main.py"], "main.py", None, [HASHES, "always", "main.py"]),
        (["-m", "package.train", "a"], "package/train.py", "package.train", ["-m", "package.train", "a"]),
        (["-um", "package.train"], "package/train.py", "package.train", ["-u", "-m", "package.train"]),
        (["-mpackage.train", "a"], "package/train.py", "package.train", ["-m", "package.train", "a"]),
        (["-m", "package", "a"], "package/__main__.py", "package.__main__", ["-m", "package", "a"]),
        (["folder", "a"], "folder/__main__.py", "__main__", ["folder", "a"]),
        (["bin/tool", "a"], "bin/tool", None, ["bin/tool", "a"]),
        (["-m", "pdb", "main.py", "a"], "main.py", None, ["main.py", "a"]),
        (["-m", "pdb", "-c", "continue", "main.py", "a"], "main.py", None, ["main.py", "a"]),
        (["-m", "pdb", "-m", "package.train", "a"], "package/train.py", "package.train", ["-m", "package.train", "a"]),
        (["-m", "coverage", "run", "-p", "main.py", "a"], "main.py", None, ["main.py", "a"]),
        (["bin/coverage", "run", "-m", "pack.train", "a"], "pack/train.py", "pack.train", ["-m", "pack.train", "a"]),
        (["-X", "a=b", "lib/debugpy", "--connect", "1", "main.py"], "main.py", None, ["-X", "a=b", "main.py"]),
    ],
)
def test_rebuilds_the_command(
    tmp_path: Path, original: list[str], file: str, module: str | None, expected: list[str]
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    assert rebuild_command(program(tmp_path, *original, file=file, module=module)) == Command(
        ("/bin/python", *expected), str(tmp_path)
    )


def test_a_wrapper_that_stays_main(tmp_path: Path) -> None:
    (tmp_path / "main.py").touch()
    running = Program(
        executable="/bin/python",
        original=("python", "-m", "cProfile", "-o", "out", "main.py", "a"),
        script="main.py",
        file="/usr/lib/python/cProfile.py",
        module="cProfile",
        directory=str(tmp_path),
    )
    assert rebuild_command(running) == Command(("/bin/python", "main.py", "a"), str(tmp_path))
    running = Program(
        executable="/bin/python",
        original=("python", "-m", "cProfile", "-m", "package.train", "a"),
        script="package.train",
        file="/usr/lib/python/cProfile.py",
        module="cProfile",
        directory=str(tmp_path),
    )
    assert rebuild_command(running) == Command(("/bin/python", "-m", "package.train", "a"), str(tmp_path))


def test_the_directory_is_that_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "main.py").touch()
    running = Program(
        executable="/bin/python",
        original=("python", "scripts/main.py"),
        script="scripts/main.py",
        file=str(tmp_path / "scripts" / "main.py"),
        module=None,
        directory="/somewhere/else/by/now",
    )
    assert rebuild_command(running).directory == str(tmp_path)


@pytest.mark.parametrize(
    ("original", "file", "module", "why"),
    [
        (["-c", "print(1)"], None, None, "was started with `python -c`"),
        (["-"], None, None, "was read from standard input"),
        ([], None, None, "is a notebook, an interactive session or standard input"),
        (
            ["-m", "ipykernel_launcher", "-f", "x"],
            None,
            None,
            "is a notebook, an interactive session or standard input",
        ),
        (["-m", "pytest", "tests"], "pytest/__main__.py", "pytest.__main__", "runs inside `pytest`"),
        (["bin/pytest"], "bin/pytest", None, "runs inside `pytest`"),
        (["/dev/null"], "/dev/null", None, "was read from `/dev/null`"),
        (["gone/main.py"], "gone/main.py", None, "was read from `{folder}/gone/main.py`, which is no file any more"),
    ],
)
def test_what_cannot_be_run_again(
    tmp_path: Path, original: list[str], file: str | None, module: str | None, why: str
) -> None:
    with pytest.raises(RuntimeError) as caught:
        rebuild_command(program(tmp_path, *original, file=file, module=module))
    assert str(caught.value) == REFUSAL.format(why=why.format(folder=tmp_path))


def test_an_embedded_interpreter(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        rebuild_command(Program("", (), "", None, None, str(tmp_path)))
    assert str(caught.value) == REFUSAL.format(why="runs in an interpreter that is embedded in another program")


def test_this_test_run_cannot_be_started_again() -> None:
    with pytest.raises(RuntimeError, match="which cannot be run again"):
        rebuild_command()


RANKS = """
import json, os, sys
from tests.processes.mini import launch
flags = [sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions, sys._xoptions]
start = [sys.argv[0], *sys.argv[1:], os.getcwd(), __name__, (__spec__ and __spec__.name), *map(str, flags)]
sys.argv[:] = ["changed"]
os.chdir("/")
rank = launch()
own = [sys.stdin.read(), os.environ.get("PYTHONBREAKPOINT"), os.environ.get("OMP_NUM_THREADS")]
with open(os.path.join(os.environ["FOLDER"], f"rank-{rank}"), "w") as file:
    json.dump([start, own], file)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "words",
    [
        ["-O", "-X", "utf8", "-W", "ignore", "main.py", "--lr", "1", "a b"],
        ["-m", "package.train", "a"],
        ["-m", "package", "a"],
        ["package", "a"],
        ["-m", "cProfile", "-o", "profile.out", "main.py", "a"],
        ["-m", "pdb", "-c", "continue", "-c", "quit", "main.py", "a"],
    ],
    ids=["flags", "module", "package", "folder", "cProfile", "pdb"],
)
def test_a_rank_sees_what_rank_0_saw(tmp_path: Path, words: list[str]) -> None:
    script(tmp_path, RANKS)
    script(tmp_path / "package", RANKS, "__main__.py")
    script(tmp_path / "package", RANKS, "train.py")
    job = python(*words, folder=tmp_path, environ={"PYTHONPATH": ROOT, "FOLDER": str(tmp_path), "OMP_NUM_THREADS": "3"})
    assert job.wait() == 0, job.stderr
    start_0, _ = json.loads((tmp_path / "rank-0").read_text())
    start_1, own_1 = json.loads((tmp_path / "rank-1").read_text())
    assert _comparable(start_1) == _comparable(start_0)
    assert own_1 == ["", "0", "1"]


def _comparable(start: list[str]) -> list[str]:
    """A debugger gives the script's path in full."""
    return [os.path.basename(start[0]), *start[1:4], *start[5:]] if len(start) > 5 else start


@pytest.mark.ranks
def test_a_program_from_standard_input(tmp_path: Path) -> None:
    path = script(tmp_path, "from tests.processes.mini import launch\nlaunch()\n")
    job = python("-c", f"exec(open({path!r}).read())", folder=tmp_path, environ={"PYTHONPATH": ROOT})
    assert job.wait() == 1
    assert job.last_line == "RuntimeError: " + REFUSAL.format(why="was started with `python -c`")


def test_the_words_are_for_this_interpreter() -> None:
    assert Program.running().executable == sys.executable
