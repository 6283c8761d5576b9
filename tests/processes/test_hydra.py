# SPDX-License-Identifier: Apache-2.0
"""The command of a rank under Hydra, from what `HydraConfig` says; Hydra itself need not be installed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fabric.processes.hydra import hydra_arguments


def hydra_job(monkeypatch: pytest.MonkeyPatch, *, mode: str, task: list[str]) -> None:
    config = SimpleNamespace(
        mode=f"RunMode.{mode}",
        runtime=SimpleNamespace(cwd="/start", output_dir="/out/it's"),
        overrides=SimpleNamespace(task=task),
    )
    module = ModuleType("hydra.core.hydra_config")
    module.HydraConfig = SimpleNamespace(initialized=lambda: True, get=lambda: config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", module)


FOLDER = ("hydra.run.dir='/out/it\\'s'", "hydra.output_subdir=null")


def test_without_hydra_nothing_changes() -> None:
    assert hydra_arguments(("a", "-m"), "/here") == (("a", "-m"), "/here")


def test_every_rank_gets_rank_0s_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    hydra_job(monkeypatch, mode="RUN", task=["lr=1"])
    assert hydra_arguments(("--config-name", "x", "lr=1"), "/here") == (
        ("--config-name", "x", "lr=1", *FOLDER),
        "/start",
    )


def test_a_rank_runs_one_job_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    hydra_job(monkeypatch, mode="MULTIRUN", task=["lr=2"])
    words = ("-m", "-cn", "x", "lr=1,2", "--config-dir=conf")
    assert hydra_arguments(words, "/here") == (("-cn", "x", "--config-dir=conf", "lr=2", *FOLDER), "/start")
