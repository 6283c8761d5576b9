# SPDX-License-Identifier: Apache-2.0
import gc
import multiprocessing
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from fabric import Fabric
from fabric.loggers import (
    AimLogger,
    ClearMLLogger,
    CometLogger,
    MLFlowLogger,
    SwanLabLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from fabric.loggers.client import ClientLogger
from fabric.loggers.null import NullExperiment
from fabric.loggers.values import as_flat_dict
from tests.ranks import RankContext, run_ranks


class LineLogger(ClientLogger):
    """Its client is a file: a line for what happens."""

    extra = "torch"

    def __init__(self, path: Path, **kwargs: Any) -> None:
        super().__init__("lines", **kwargs)
        self._path = path

    @override
    def log_hyperparams(self, params: Any) -> None:
        self.experiment(f"params {params}")

    @override
    def _open(self) -> tuple[Any, Callable[[str], None]]:
        path, run = self._path, self._version or f"run-{random.random()}"
        self._version = run

        def write(line: str) -> None:
            with path.open("a") as file:
                file.write(f"{line}\n")

        write("opened" if run.startswith("run-") else f"opened {run}")
        return write, lambda status: write(f"closed {status}")

    @override
    def _send(self, metrics: dict[str, Any], step: int | None) -> None:
        self.experiment(f"{metrics} {self._counted(step)}")

    @override
    def _flush(self, client: Any) -> None:
        client("flushed")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_the_client_is_made_when_it_is_first_used(tmp_path: Path) -> None:
    logger = LineLogger(tmp_path / "log", prefix="train", version="v")
    logger.save()
    logger.finalize("success")
    assert (logger.name, logger.version, lines(tmp_path / "log")) == ("lines", "v", [])
    logger.log_metrics({"loss": torch.tensor(0.5)}, step=3)
    logger.log_metrics({"loss": 0.25})
    logger.save()
    logger.finalize("failed")
    logger.finalize("failed")
    assert lines(tmp_path / "log") == [
        "opened v",
        "{'train-loss': 0.5} 3",
        "{'train-loss': 0.25} 4",
        "flushed",
        "flushed",
        "closed failed",
    ]


def test_after_the_end_the_same_run_goes_on(tmp_path: Path) -> None:
    logger = LineLogger(tmp_path / "log")
    logger.log_metrics({"a": 1})
    version = logger.version
    logger.finalize("success")
    copy = pickle.loads(pickle.dumps(logger))
    logger.log_metrics({"a": 2})
    copy.log_metrics({"a": 2})
    assert logger.version == copy.version == version
    copy.finalize("success")
    logger.finalize("success")


def test_a_run_is_closed_with_its_logger(tmp_path: Path) -> None:
    logger = LineLogger(tmp_path / "log", version="v")
    logger.log_metrics({"a": 1})
    del logger
    gc.collect()
    assert lines(tmp_path / "log") == ["opened v", "{'a': 1} 0", "closed success"]


def test_a_name_that_the_client_draws_does_not_change_the_random_numbers(tmp_path: Path) -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    LineLogger(tmp_path / "log").log_metrics({"a": 1})
    assert random.random() == expected


def log_here(logger: LineLogger) -> None:
    logger.log_metrics({"a": 2})


def test_a_forked_process_opens_its_own_and_closes_it(tmp_path: Path) -> None:
    logger = LineLogger(tmp_path / "log", version="v")
    logger.log_metrics({"a": 1})
    process = multiprocessing.get_context("spawn" if sys.platform == "win32" else "fork").Process(
        target=log_here, args=(logger,)
    )
    process.start()
    process.join()
    assert lines(tmp_path / "log")[2:] == ["opened v", "{'a': 2} 1", "closed success"]
    logger.finalize("success")


ENDS = """
import sys
from pathlib import Path
from fabric import Fabric
from tests.loggers.test_client import LineLogger

logger = LineLogger(Path(sys.argv[1]), version="v")
if sys.argv[2] == "alone":
    logger.log_metrics({"a": 1})
else:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    fabric.launch()
    fabric.log("a", 1)
if sys.argv[3] == "raise":
    raise RuntimeError("the loop failed")
"""


@pytest.mark.parametrize(("where", "how", "status"), [("alone", "raise", "failed"), ("fabric", "end", "success")])
def test_a_program_that_just_ends_closes_the_run(tmp_path: Path, where: str, how: str, status: str) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", ENDS, str(tmp_path / "log"), where, how]
    ended = subprocess.run(command, timeout=120, cwd=root, stderr=subprocess.PIPE, text=True)
    written = lines(tmp_path / "log")
    assert written[:2] + written[-1:] == ["opened v", "{'a': 1} 0", f"closed {status}"], ended.stderr
    assert [line for line in written if line.startswith("closed")] == [f"closed {status}"]


def fail(fabric: Fabric) -> None:
    fabric.log("a", 1)
    raise RuntimeError("the loop failed")


def test_a_launched_function_that_fails_closes_the_run(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=LineLogger(tmp_path / "log", version="v"))
    with pytest.raises(RuntimeError, match="the loop failed"):
        fabric.launch(fail)
    assert lines(tmp_path / "log") == ["opened v", "{'a': 1} 0", "flushed", "closed failed"]


def log_on_ranks(context: RankContext) -> tuple[str, list[str]]:
    logger = LineLogger(context.directory / "log", version="v")
    fabric = context.fabric(loggers=logger)
    fabric.log("rank", fabric.global_rank)
    logger.log_hyperparams("lr")
    kind = type(logger.experiment).__name__
    logger.finalize("success")
    fabric.barrier()
    return kind, lines(context.directory / "log")


@pytest.mark.ranks
def test_only_rank_zero_opens_a_run() -> None:
    zero, one = run_ranks(2, log_on_ranks)
    assert zero == ("function", ["opened v", "{'rank': 0} 0", "params lr", "flushed", "closed success"])
    assert one == (NullExperiment.__name__, zero[1])


def test_the_null_experiment_takes_anything() -> None:
    experiment = NullExperiment()
    experiment.config["lr"] = 0.1
    experiment.name = "a"
    assert experiment.log({"a": 1}, step=2).summary["best"] is experiment
    assert pickle.loads(pickle.dumps(experiment)).anything() is not None


NEEDS = {
    AimLogger: ("aim", "aim"),
    ClearMLLogger: ("clearml", "clearml"),
    CometLogger: ("comet-ml", "comet"),
    MLFlowLogger: ("mlflow", "mlflow"),
    SwanLabLogger: ("swanlab", "swanlab"),
    TensorBoardLogger: ("tensorboard", "tensorboard"),
    TrackioLogger: ("trackio>=0.43", "trackio"),
    WandbLogger: ("wandb", "wandb"),
}


@pytest.mark.parametrize("logger", NEEDS, ids=lambda logger: logger.__name__)
def test_each_logger_names_its_extra(logger: type[ClientLogger]) -> None:
    requirement, extra = NEEDS[logger]
    assert (logger.requirement or logger.extra, logger.extra) == (requirement, extra)


class MissingLogger(LineLogger):
    extra, requirement = "wandb", "no-such-package"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_client_that_is_missing_is_an_error_on_every_rank(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ModuleNotFoundError) as error:
        MissingLogger(Path())
    assert str(error.value) == (
        "`MissingLogger` needs 'no-such-package'. Install it with: pip install 'fabric-runtime[wandb]'"
    )


def test_no_client_is_imported_with_the_loggers() -> None:
    clients = {"aim", "clearml", "comet_ml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"}
    script = "import fabric.loggers, sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert set(done.stdout.split()) & clients == set()


def test_hyperparameters_are_flattened() -> None:
    import numpy as np

    params = {"a": {"b": torch.tensor(1.5), "c": {"d": None}}, "e": np.float32(0.5), "f": [1], "g": True}
    assert as_flat_dict(params) == {"a/b": 1.5, "a/c/d": "None", "e": 0.5, "f": "[1]", "g": True}
