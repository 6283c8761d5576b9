# SPDX-License-Identifier: Apache-2.0
"""The examples and the first program of the docs, with few steps, started as a user starts them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
# One thread, so that a run takes the same time and gives the same bits on a busy machine.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
GPT = str(ROOT / "examples" / "gpt" / "main.py")
LOCAL_SGD = str(ROOT / "examples" / "custom_strategy" / "main.py")
FLAGS = ("--accelerator", "cpu", "--steps", "6", "--log-every", "2", "--save-every", "2")
LOSSES = re.compile(r"step +(\d+)  loss ([\d.]+)  val ([\d.]+)")


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(cwd: Path, *flags: str) -> list[tuple[float, ...]]:
    return [tuple(map(float, line)) for line in LOSSES.findall(run(GPT, *FLAGS, *flags, cwd=cwd))]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, ...]]]:
    cwd = tmp_path_factory.mktemp("reference")
    return cwd, train(cwd)


def test_gpt_trains_and_leaves_its_files(reference: tuple[Path, list[tuple[float, ...]]]) -> None:
    cwd, losses = reference
    assert [step for step, _, _ in losses] == [2, 4, 6]
    assert losses[-1][1] < losses[0][1] - 0.5
    assert (cwd / "runs/gpt/loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((cwd / "runs/gpt/logs/version_0/metrics.csv").read_text().splitlines()) == 4
    assert torch.load(cwd / "runs/gpt/checkpoint.pt")["step"] == 6


@pytest.mark.ranks
def test_gpt_in_two_processes_has_the_same_losses(
    reference: tuple[Path, list[tuple[float, ...]]], tmp_path: Path
) -> None:
    assert torch.allclose(torch.tensor(train(tmp_path, "--devices", "2")), torch.tensor(reference[1]), atol=5e-4)


def test_gpt_killed_and_resumed_ends_with_the_very_same_weights(
    reference: tuple[Path, list[tuple[float, ...]]], tmp_path: Path
) -> None:
    command = [sys.executable, "-u", GPT, *FLAGS]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step    4"):
                process.kill()  # before, while or after the checkpoint of this step is written
    assert process.returncode == -signal.SIGKILL
    losses = train(tmp_path, "--resume")
    assert losses[-1] == reference[1][-1]
    expected, resumed = (torch.load(cwd / "runs/gpt/checkpoint.pt") for cwd in (reference[0], tmp_path))
    assert resumed["curve"] == expected["curve"]
    assert all(torch.equal(resumed["model"][name], value) for name, value in expected["model"].items())


@pytest.mark.ranks
def test_local_sgd_averages_every_k_steps(tmp_path: Path) -> None:
    flags = ("--accelerator", "cpu", "--devices", "2", "--every", "4", "--steps", "16", "--log-every", "8")
    lines = re.findall(
        r"step +(\d+)  loss ([\d.]+)  ranks apart by ([\d.]+)  averages (\d)", run(LOCAL_SGD, *flags, cwd=tmp_path)
    )
    assert [(step, averages) for step, _, _, averages in lines] == [("7", "1"), ("8", "2"), ("15", "3"), ("16", "4")]
    apart = [float(apart) for _, _, apart, _ in lines]
    assert apart[0] > 0
    assert apart[2] > 0
    assert apart[1] == apart[3] == 0


def test_the_first_program_of_the_docs(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "getting-started.md").read_text(), flags=re.DOTALL)
    assert program is not None
    (tmp_path / "main.py").write_text(program[1])
    assert re.fullmatch(r"epoch 0: [\d.]+\nepoch 1: [\d.]+\n", run("main.py", cwd=tmp_path))
