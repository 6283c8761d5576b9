# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import Client

AIM = Client(
    "AimLogger",
    "aim",
    '"gpt", repo="runs", system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False',
)
AIM.skip_unless_installed()
pytestmark = [pytest.mark.aim, pytest.mark.ranks]

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


def test_a_run_in_a_local_repository(tmp_path: Path) -> None:
    zero, one = AIM.log_on_two_ranks(tmp_path)
    version = zero[2]
    assert zero == ["Run", "gpt", version]
    assert one == ["NullExperiment", "gpt", None]
    before, after = AIM.continue_and_fail(tmp_path, version, READ)
    params = {"optimizer": {"lr": 0.5}, "rank": 0}
    rows = {"loss": [[3, 0.5], [4, 0.25]]}
    assert before == [[version, "gpt", params, rows, "success"]]
    assert after == [[version, "gpt", params, {**rows, "more-loss": [[5, 0.125]]}, "failed"]]
