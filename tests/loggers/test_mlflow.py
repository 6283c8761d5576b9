# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import Client

MLFLOW = Client(
    "MLFlowLogger",
    "mlflow",
    '"gpt", tracking_uri="sqlite:///runs.db", run_name="large", tags={"a": "b"}',
    {"MLFLOW_DISABLE_TELEMETRY": "true"},
)
MLFLOW.skip_unless_installed()
pytestmark = [pytest.mark.mlflow, pytest.mark.ranks]

READ = """
from mlflow.tracking import MlflowClient

def read():
    client = MlflowClient("sqlite:///runs.db")
    experiment = client.get_experiment_by_name("gpt")
    found = []
    for run in client.search_runs([experiment.experiment_id]):
        id = run.info.run_id
        rows = {m: [(x.step, x.value) for x in client.get_metric_history(id, m)] for m in run.data.metrics}
        found.append([id, run.info.run_name, run.info.status, run.data.tags["a"], run.data.params, rows])
    return found
"""


def test_a_run_in_a_local_store(tmp_path: Path) -> None:
    zero, one = MLFLOW.log_on_two_ranks(tmp_path)
    version = zero[2]
    assert zero == ["MlflowClient", "gpt", version]
    assert one == ["NullExperiment", "gpt", None]
    before, after = MLFLOW.continue_and_fail(tmp_path, version, READ)
    params = {"optimizer/lr": "0.5", "rank": "0"}
    rows = {"loss": [[3, 0.5], [4, 0.25]]}
    assert before == [[version, "large", "FINISHED", "b", params, rows]]
    rows["more-loss"] = [[5, 0.125]]
    assert after == [[version, "large", "FAILED", "b", params, rows]]
