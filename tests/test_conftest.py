# SPDX-License-Identifier: Apache-2.0
"""The leak fixtures catch what they say: each leak below is a test of its own, run by an inner pytest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = {
    "os.environ['LEAK'] = '1'": "the test changed environment: LEAK: None -> '1'",
    "open('leak.txt', 'w').close()": "the test left files in the working directory: ['leak.txt']",
    "threading.Thread(target=time.sleep, args=(3,), name='x').start()": "the test left a thread: <Thread(x, started",
    "subprocess.Popen(['sleep', '3'])": "the test left a process: ",
    "store = dist.HashStore(); dist.init_process_group('gloo', store=store, rank=0, world_size=1)": (
        "the test changed process group: none -> initialised"
    ),
    "torch.set_default_dtype(torch.float64)": "the test changed torch: default dtype: torch.float32 -> torch.float64",
    "sys.excepthook = print": "the test changed the handlers of this process: sys.excepthook: <built-in",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One inner session over all leaks; none of them may spoil the harmless test after it."""
    directory = tmp_path_factory.mktemp("leaks")
    lines = ["import os, subprocess, sys, threading, time", "import torch, torch.distributed as dist", ""]
    for index, leak in enumerate(LEAKS):
        lines += [f"def test_{index}():", f"    {leak}", f"def test_{index}_after():", "    pass"]
    (directory / "test_leaks.py").write_text("\n".join(lines) + "\n")
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir=."]
    run = subprocess.run(
        [*command, "test_leaks.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    return run.stdout + run.stderr


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_fails_the_test_that_made_it(leak, report):
    assert LEAKS[leak] in report
    assert f"ERROR test_leaks.py::test_{list(LEAKS).index(leak)} " in report


def test_a_leak_spoils_no_other_test(report):
    assert f"{2 * len(LEAKS)} passed, {len(LEAKS)} errors" in report
