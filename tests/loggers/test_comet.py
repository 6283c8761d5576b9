# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import Client

READ = """
import zipfile

def read():
    found = []
    for path in sorted(Path("runs").glob("*.zip"), key=lambda path: path.stat().st_mtime):
        with zipfile.ZipFile(path) as archive:
            experiment = json.loads(archive.read("experiment.json"))
            messages = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
        run = {"key": experiment["offline_id"], "project": experiment["project_name"], "rows": [], "params": {}}
        for message in messages:
            payload = message["payload"]
            if message["type"] == "metric_msg" and "loss" in payload["metric"]["metricName"]:
                metric = payload["metric"]
                run["rows"].append([metric["metricName"], metric["step"], metric["metricValue"]])
            if message["type"] == "parameter_msg" and payload["param"]["source"] == "manual":
                run["params"][payload["param"]["paramName"]] = payload["param"]["paramValue"]
            if message["type"] == "log_other" and payload["key"] == "status":
                run["status"] = payload["value"]
        found.append(run)
    return found
"""

COMET = Client(
    "CometLogger",
    "comet-ml",
    'project="gpt", offline=True',
    READ,
    {
        "COMET_OFFLINE_DIRECTORY": "runs",
        "COMET_LOGGING_CONSOLE": "ERROR",
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_AUTO_LOG_ENV_DETAILS": "false",
    },
    apart=True,
)
COMET.skip_unless_installed()
pytestmark = pytest.mark.comet


def test_a_run_offline(tmp_path: Path) -> None:
    said = COMET.run(tmp_path)
    assert said.kinds == ["OfflineExperiment"]
    name, version = said.named
    assert name == "gpt"
    first, second = said.after
    assert first == {
        "key": version,
        "project": "gpt",
        "rows": [["loss", 3, 0.5], ["loss", 4, 0.25]],
        "params": {"optimizer/lr": 0.5, "rank": 0},
        "status": "failed",
    }
    assert (second["key"], second["rows"]) == (version, [["more-loss", 5, 0.125]])
