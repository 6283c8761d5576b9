# SPDX-License-Identifier: Apache-2.0
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from fabric.processes.token import LaunchToken
from fabric.utilities.rank_zero import global_rank, rank_zero_info, rank_zero_only, rank_zero_warn

RANK_VARIABLES = ("RANK", "FABRIC_NODE_RANK", "NODE_RANK", "FABRIC_LAUNCH")


@pytest.fixture(autouse=True)
def _no_rank_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def token(*, launcher_pid: int) -> dict[str, str]:
    fields = dict.fromkeys(LaunchToken._fields)
    known = {"launcher_pid": launcher_pid, "rank": 5}
    return LaunchToken(**{**fields, **known}).to_environ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"RANK": "0", "NODE_RANK": "1"}, 0),
        ({"NODE_RANK": "2"}, 2),
        ({"FABRIC_NODE_RANK": "1", "NODE_RANK": "0"}, 1),
        ({**token(launcher_pid=os.getppid()), "RANK": "1"}, 5),
        (token(launcher_pid=os.getpid()), 0),
    ],
)
def test_the_rank_before_a_process_group(environ: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert global_rank() == rank


def test_the_rank_of_the_process_group_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # PyTorch puts its own in place
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert global_rank() == 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "results"), [("0", (8, 8)), ("1", (None, -1))])
def test_rank_zero_only(rank: str, results: tuple[int | None, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    monkeypatch.setenv("RANK", rank)
    assert (rank_zero_only(double)(4), rank_zero_only(double, default=-1)(x=4)) == results
    assert (rank_zero_only(double).__name__, rank_zero_only(double).__doc__) == ("double", "Twice x.")


def test_a_warning_shows_the_line_that_called_the_function_that_warns() -> None:
    def library_function() -> None:
        rank_zero_warn("careful", category=RuntimeWarning)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library_function()
    assert [(str(w.message), w.category, w.filename) for w in caught] == [("careful", RuntimeWarning, __file__)]
    assert (
        caught[0].lineno
        == test_a_warning_shows_the_line_that_called_the_function_that_warns.__code__.co_firstlineno + 6
    )


def test_other_ranks_neither_warn_nor_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO, logger="fabric"):
        rank_zero_warn("careful")
        rank_zero_info("hello")
    assert caplog.records == []


def test_info_goes_to_the_logger_named_fabric(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fabric"):
        rank_zero_info("loaded %d keys", 3)
    assert [(r.name, r.levelname, r.message, r.filename) for r in caplog.records] == [
        ("fabric", "INFO", "loaded 3 keys", os.path.basename(__file__))
    ]


def test_import_sets_up_no_logging() -> None:
    script = (
        "import logging, fabric.utilities.rank_zero as r; print(r.log.handlers, r.log.level, logging.root.handlers)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "[] 0 []\n"
