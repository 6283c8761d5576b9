# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import Client

READ = """
from aim import Repo

def read():
    found = []
    for run in Repo("runs").iter_runs():
        rows = {}
        for metric in run.metrics():
            steps, values = metric.values.sparse_list()
            rows[metric.name] = [list(row) for row in zip(steps, values)]
        found.append([run.hash, run.experiment, run["hparams"], rows, run["status"]])
    return found
"""

AIM = Client(
    "AimLogger",
    "aim",
    '"gpt", repo="runs", system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False',
    READ,
)
AIM.skip_unless_installed()
pytestmark = pytest.mark.aim


def test_a_run_in_a_local_repository(tmp_path: Path) -> None:
    said = AIM.run(tmp_path)
    assert said.kinds == ["Run"]
    name, version = said.named
    assert name == "gpt"
    params = {"optimizer": {"lr": 0.5}, "rank": 0}
    rows = {"loss": [[3, 0.5], [4, 0.25]]}
    assert said.before == [[version, "gpt", params, rows, "failed"]]
    assert said.after == [[version, "gpt", params, {**rows, "more-loss": [[5, 0.125]]}, "success"]]
