# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import Client

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

MLFLOW = Client(
    "MLFlowLogger",
    "mlflow",
    '"gpt", tracking_uri="sqlite:///runs.db", run_name="large", tags={"a": "b"}',
    READ,
    {"MLFLOW_DISABLE_TELEMETRY": "true"},
)
MLFLOW.skip_unless_installed()
pytestmark = pytest.mark.mlflow


def test_a_run_in_a_local_store(tmp_path: Path) -> None:
    said = MLFLOW.run(tmp_path)
    assert said.kinds == ["MlflowClient"]
    name, version = said.named
    assert name == "gpt"
    params = {"optimizer/lr": "0.5", "rank": "0"}
    rows = {"loss": [[3, 0.5], [4, 0.25]]}
    assert said.before == [[version, "large", "FAILED", "b", params, rows]]
    assert said.after == [[version, "large", "FINISHED", "b", params, {**rows, "more-loss": [[5, 0.125]]}]]
