# SPDX-License-Identifier: Apache-2.0
import csv
import json
import os
import pickle
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
import torch

from fabric.loggers import CSVLogger
from fabric.loggers.growing_file import LocalFile, RemoteFile
from tests.processes.jobs import python, script


def rows(path: Path | str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_on_disk_when_log_metrics_returns(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.5, "correct": torch.tensor(3)}, step=7)
    assert (tmp_path / "fabric_logs/version_0/metrics.csv").read_text() == "step,loss,correct\n7,0.5,3\n"


def test_a_row_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from fabric.loggers import CSVLogger\n"
        "CSVLogger(sys.argv[1], name='').log_metrics({'loss': 1.0}, step=0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert rows(tmp_path / "version_0/metrics.csv") == [{"step": "0", "loss": "1.0"}]


def test_a_new_column_keeps_the_rows_before_it(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="")
    logger.log_metrics({"loss": 0.5}, step=0)
    logger.log_metrics({"val": 0.25, "loss": 0.5}, step=1)
    logger.log_metrics({"loss": 0.125}, step=2)
    text = "step,loss,val\n0,0.5,\n1,0.5,0.25\n2,0.125,\n"
    assert (tmp_path / "version_0/metrics.csv").read_text() == text
    assert os.listdir(tmp_path / "version_0") == ["metrics.csv"]


def test_a_version_that_exists_is_continued(tmp_path: Path) -> None:
    CSVLogger(tmp_path, version="run").log_metrics({"loss": 0.5}, step=0)
    CSVLogger(tmp_path, version="run").log_metrics({"loss": 0.25, "accuracy": 1.0}, step=1)
    logger = CSVLogger(tmp_path, version="run")
    logger.log_metrics({"accuracy": 0.5})
    assert (tmp_path / "fabric_logs/run/metrics.csv").read_text() == "step,loss,accuracy\n0,0.5,\n1,0.25,1.0\n2,,0.5\n"


def test_a_file_without_its_last_line_end_is_continued_on_a_new_line(tmp_path: Path) -> None:
    folder = tmp_path / "version_3"
    folder.mkdir()
    (folder / "metrics.csv").write_text("step,loss\n0,0.5")
    CSVLogger(tmp_path, name=None, version=3).log_metrics({"loss": 0.25}, step=1)
    assert (folder / "metrics.csv").read_text() == "step,loss\n0,0.5\n1,0.25\n"


def test_names_with_separators_and_quotes_come_back(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", prefix="train")
    logger.log_metrics({'top-5, "exact"': 1.0})
    logger.log_metrics({"lines\nof text": 2.0})
    assert rows(tmp_path / "version_0/metrics.csv") == [
        {"step": "0", 'train-top-5, "exact"': "1.0", "train-lines\nof text": ""},
        {"step": "1", 'train-top-5, "exact"': "", "train-lines\nof text": "2.0"},
    ]


def test_the_step_may_be_a_metric(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="")
    logger.log_metrics({"loss": 1.0, "step": 40})
    logger.log_metrics({"loss": 2.0, "step": 40}, step=50)
    assert (tmp_path / "version_0/metrics.csv").read_text() == "step,loss\n40,1.0\n50,2.0\n"


def test_versions_count_up(tmp_path: Path) -> None:
    for name in ("version_2", "version_10", "version_x", "other"):
        (tmp_path / "gpt" / name).mkdir(parents=True)
    logger = CSVLogger(tmp_path, name="gpt")
    assert (logger.name, logger.version, logger.root_dir) == ("gpt", 11, str(tmp_path))
    assert logger.log_dir == str(tmp_path / "gpt" / "version_11")
    assert not os.path.exists(logger.log_dir)


def test_two_jobs_that_start_at_once_get_two_versions(tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path, name=""), CSVLogger(tmp_path, name="")
    second.log_metrics({"loss": 2.0})
    first.log_metrics({"loss": 1.0})
    assert (second.version, first.version) == (0, 1)
    assert rows(tmp_path / "version_1/metrics.csv") == [{"step": "0", "loss": "1.0"}]


def test_a_version_that_was_read_stays(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="")
    os.makedirs(logger.log_dir)
    logger.log_metrics({"loss": 1.0})
    assert os.listdir(tmp_path) == ["version_0"]


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0})
    logger.log_hyperparams({"lr": 0.1})
    logger.save()
    logger.finalize("success")
    assert os.listdir(tmp_path) == []


def test_a_pickled_logger_goes_on_in_the_same_version(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="")
    logger.log_metrics({"loss": 1.0})
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"loss": 2.0})
    assert [row["loss"] for row in rows(tmp_path / "version_0/metrics.csv")] == ["1.0", "2.0"]


def test_hyperparameters_are_merged(tmp_path: Path) -> None:
    @dataclass
    class Config:
        lr: float

    logger = CSVLogger(tmp_path, name="")
    logger.log_hyperparams({"seed": 1, "path": Path("x")})
    logger.log_hyperparams(Namespace(seed=2))
    logger.log_hyperparams(Config(lr=0.5))
    CSVLogger(tmp_path, name="", version=0).log_hyperparams({"more": [1, 2]})
    written = json.loads((tmp_path / "version_0/hparams.json").read_text())
    assert written == {"seed": 2, "path": "x", "lr": 0.5, "more": [1, 2]}


def test_a_metric_of_several_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        CSVLogger(tmp_path).log_metrics({"loss": torch.zeros(2, 3)})
    assert str(error.value) == (
        "`log_metrics` got a tensor of shape (2, 3) for `loss`, which is not one number."
        " Reduce it first, for example with `.mean()`."
    )
    assert os.listdir(tmp_path) == []


def test_the_flush_interval_is_at_least_one() -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        CSVLogger("logs", flush_logs_every_n_steps=0)
    assert str(error.value) == "`CSVLogger(flush_logs_every_n_steps=0)` must be at least 1."


def test_a_file_url_is_the_local_disk(tmp_path: Path) -> None:
    CSVLogger(f"file://{tmp_path}/logs").log_metrics({"loss": 1.0})
    assert rows(tmp_path / "logs/fabric_logs/version_0/metrics.csv") == [{"step": "0", "loss": "1.0"}]


def test_a_local_file_is_replaced_whole(tmp_path: Path) -> None:
    file = LocalFile(str(tmp_path / "a"))
    assert file.read() == ""
    file.append("one\n")
    file.replace("two\n")
    file.flush()
    assert file.read() == "two\n"
    assert os.listdir(tmp_path) == ["a"]


@pytest.fixture
def memory_url() -> Iterator[str]:
    filesystem = fsspec.filesystem("memory")
    yield "memory://bucket/logs"
    filesystem.rm("/bucket", recursive=True)


def remote_text(url: str) -> str:
    with fsspec.open(url, "r") as file:
        return str(file.read())


def test_a_url_makes_no_local_folder_and_is_continued(
    tmp_path: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logger = CSVLogger(memory_url)
    logger.log_metrics({"loss": 1.0})
    logger.log_metrics({"val": 2.0})
    logger.log_hyperparams({"lr": 0.5})
    logger.save()
    again = CSVLogger(memory_url, version=0)
    again.log_metrics({"loss": 3.0})
    again.finalize("success")
    assert logger.log_dir == "memory://bucket/logs/fabric_logs/version_0"
    assert remote_text(f"{logger.log_dir}/metrics.csv") == "step,loss,val\n0,1.0,\n1,,2.0\n2,3.0,\n"
    assert json.loads(remote_text(f"{logger.log_dir}/hparams.json")) == {"lr": 0.5}
    assert CSVLogger(memory_url).version == 1
    assert os.listdir(tmp_path) == []


def test_rows_go_out_to_a_url_in_steps_and_when_the_logger_goes(memory_url: str) -> None:
    logger = CSVLogger(memory_url, name="", version="v", flush_logs_every_n_steps=2)
    url = f"{memory_url}/v/metrics.csv"
    seen = []
    for step in range(4):
        logger.log_metrics({"loss": 1.0}, step=step)
        seen.append(remote_text(url).count("\n") - 1)
    assert seen == [0, 2, 2, 4]
    logger.log_metrics({"loss": 1.0}, step=4)
    del logger
    assert remote_text(url).endswith("4,1.0\n")


def test_rows_go_out_to_a_url_after_some_time(memory_url: str) -> None:
    file = RemoteFile(f"{memory_url}/a", every_n=100, every_seconds=0.0)
    file.append("one\n")
    assert remote_text(f"{memory_url}/a") == "one\n"


# A file system whose files have no append and which the logger does not know as the local disk.
BUCKET = """
import sys, time
from pathlib import Path
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Bucket(LocalFileSystem):
    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("bucket://"))

    def open(self, path, mode="rb", **kwargs):
        self.makedirs(self._parent(self._strip_protocol(path)), exist_ok=True)
        return super().open(path, mode, **kwargs)

fsspec.register_implementation("bucket", Bucket)
from fabric.loggers import CSVLogger
"""
FAILS = """
logger = CSVLogger("bucket://" + sys.argv[1], name="")
logger.log_metrics({"loss": 1.0}, step=0)
raise RuntimeError("the loop failed")
"""


def test_rows_go_out_to_a_url_at_the_end_of_a_process_that_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUCKET + FAILS, str(tmp_path)]
    ended = subprocess.run(command, timeout=120, stderr=subprocess.PIPE, text=True)
    assert ended.stderr.endswith("RuntimeError: the loop failed\n")
    assert rows(tmp_path / "version_0/metrics.csv") == [{"step": "0", "loss": "1.0"}]


JOB = """
from fabric import Fabric
from fabric.loggers import Logger

class StatusLogger(Logger):
    name, version = "status", 0

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass

    def finalize(self, status):
        Path(sys.argv[1], f"status-{fabric.global_rank}").write_text(status)

def main(fabric):
    fabric.log("loss", 1.0, step=0)
    fabric.barrier()
    folder = Path(sys.argv[1])
    (folder / f"new-{fabric.global_rank}").write_text(str(os.getpid()))
    (folder / f"new-{fabric.global_rank}").rename(folder / f"ready-{fabric.global_rank}")
    if sys.argv[2] == "exit":
        sys.exit(3)
    if sys.argv[2] == "wait":
        fabric.barrier() if fabric.global_rank == 0 else time.sleep(60)

if __name__ == "__main__":
    import os
    logger = CSVLogger("bucket://" + sys.argv[1] + "/logs", name="", version=0)
    fabric = Fabric(accelerator="cpu", devices=2, loggers=[logger, StatusLogger()], strategy=sys.argv[3])
    if sys.argv[3] == "ddp":
        fabric.launch()
        main(fabric)
    else:
        fabric.launch(main)
"""


@pytest.mark.ranks
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("act", "strategy", "signals", "code", "status"),
    [
        ("exit", "ddp", {}, 3, None),  # rank 0 ends by itself, before it can know of the others
        ("wait", "ddp", {0: signal.SIGTERM}, 128 + signal.SIGTERM, "failed"),
        ("wait", "ddp", {1: signal.SIGKILL}, 128 + signal.SIGKILL, "failed"),
        ("end", "ddp_fork", {}, 0, None),
    ],
)
def test_rows_go_out_to_a_url_however_a_job_ends(
    tmp_path: Path, act: str, strategy: str, signals: dict[int, int], code: int, status: str | None
) -> None:
    job = python(
        script(tmp_path, BUCKET + JOB), str(tmp_path), act, strategy, folder=tmp_path, environ={"FABRIC_GRACE": "1"}
    )
    pids = [int(job.said(f"ready-{rank}")) for rank in range(2)]
    for rank, signum in signals.items():
        os.kill(pids[rank], signum)
    assert job.wait() == code
    assert rows(tmp_path / "logs/version_0/metrics.csv") == [{"step": "0", "loss": "1.0"}]
    assert status is None or (tmp_path / "status-0").read_text() == status
