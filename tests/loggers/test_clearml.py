# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import Client

READ = """
def read():
    found = []
    for path in sorted(Path("cache").glob("offline/offline-*/task.json"), key=lambda path: path.stat().st_mtime):
        task = json.loads(path.read_text())
        lines = path.with_name("metrics.jsonl").read_text().splitlines()
        rows = [[row["metric"], row["iter"], row["value"]] for line in lines for row in json.loads(line)]
        sections = {section: params for section, params in task["hyperparams"].items() if section != "Args"}
        hyperparams = {f"{s}/{n}": param["value"] for s, params in sections.items() for n, param in params.items()}
        zipped = path.parent.with_name(path.parent.name + ".zip").exists()
        found.append([task["id"], task["project_name"], task["name"], hyperparams, rows, zipped])
    return found
"""

CLEARML = Client(
    "ClearMLLogger",
    "clearml",
    '"gpt", task_name="large", auto_connect_frameworks=False, auto_resource_monitoring=False',
    READ,
    {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": "cache", "CLEARML_CONFIG_FILE": "clearml.conf"},
)
CLEARML.skip_unless_installed()
pytestmark = pytest.mark.clearml


def test_a_task_offline(tmp_path: Path) -> None:
    # The process that it reports from takes up to 11 seconds to end, a thread none.
    (tmp_path / "clearml.conf").write_text("sdk { development { report_use_subprocess: false } }")
    said = CLEARML.run(tmp_path)
    assert said.kinds == ["Task"]
    name, version = said.named
    assert name == "gpt"
    params = {"optimizer/lr": "0.5", "General/rank": "0"}
    rows = [["loss", 3, 0.5], ["loss", 4, 0.25]]
    assert said.before == [[version, "gpt", "large", params, rows, True]]
    assert said.after == [[version, "gpt", "large", params, [*rows, ["more-loss", 5, 0.125]], True]]
