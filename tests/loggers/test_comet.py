# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import Client

COMET = Client(
    "CometLogger",
    "comet-ml",
    'project="gpt", offline=True',
    {
        "COMET_OFFLINE_DIRECTORY": "runs",
        "COMET_LOGGING_CONSOLE": "ERROR",
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_AUTO_LOG_ENV_DETAILS": "false",
    },
)
COMET.skip_unless_installed()
pytestmark = [pytest.mark.comet, pytest.mark.ranks]

READ = """
import zipfile
from pathlib import Path

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


def test_a_run_offline(tmp_path: Path) -> None:
    zero, one = COMET.log_on_two_ranks(tmp_path)
    version = zero[2]
    assert zero == ["OfflineExperiment", "gpt", version]
    assert one == ["NullExperiment", "gpt", None]
    (first,), (again, second) = COMET.continue_and_fail(tmp_path, version, READ)
    assert first == {
        "key": version,
        "project": "gpt",
        "rows": [["loss", 3, 0.5], ["loss", 4, 0.25]],
        "params": {"optimizer/lr": 0.5, "rank": 0},
    }
    assert again == first
    assert (second["key"], second["rows"], second["status"]) == (version, [["more-loss", 5, 0.125]], "failed")
