# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import Client

READ = """
from trackio.sqlite_storage import SQLiteStorage

def read():
    found = []
    for name in SQLiteStorage.get_runs("gpt"):
        config = {k: v for k, v in SQLiteStorage.get_run_config("gpt", name).items() if not k.startswith("_")}
        rows = [{k: v for k, v in row.items() if k != "timestamp"} for row in SQLiteStorage.get_logs("gpt", name)]
        found.append([name, config, rows])
    return found
"""

TRACKIO = Client(
    "TrackioLogger",
    "trackio>=0.43",
    '"gpt", auto_log_cpu=False, auto_log_gpu=False',
    READ,
    {"TRACKIO_DIR": "runs", "HF_HUB_OFFLINE": "1"},
)
TRACKIO.skip_unless_installed()
pytestmark = pytest.mark.trackio


def test_a_local_run(tmp_path: Path) -> None:
    said = TRACKIO.run(tmp_path)
    assert said.kinds == ["Run"]
    name, version = said.named
    assert name == "gpt"
    config = {"optimizer/lr": 0.5, "rank": 0}
    rows = [{"loss": 0.5, "step": 3}, {"loss": 0.25, "step": 4}]
    assert said.before == [[version, config, rows]]
    ((again, _, continued),) = said.after
    assert (again, continued) == (version, [*rows, {"more-loss": 0.125, "step": 5}])
