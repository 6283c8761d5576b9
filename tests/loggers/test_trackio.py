# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import Client

TRACKIO = Client(
    "TrackioLogger",
    "trackio>=0.43",
    '"gpt", auto_log_cpu=False, auto_log_gpu=False',
    {"TRACKIO_DIR": "runs", "HF_HUB_OFFLINE": "1"},
)
TRACKIO.skip_unless_installed()
pytestmark = [pytest.mark.trackio, pytest.mark.ranks]

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


def test_a_local_run(tmp_path: Path) -> None:
    zero, one = TRACKIO.log_on_two_ranks(tmp_path)
    version = zero[2]
    assert zero == ["Run", "gpt", version]
    assert one == ["NullExperiment", "gpt", None]
    before, after = TRACKIO.continue_and_fail(tmp_path, version, READ)
    config = {"optimizer/lr": 0.5, "rank": 0}
    rows = [{"loss": 0.5, "step": 3}, {"loss": 0.25, "step": 4}]
    assert before == [[version, config, rows]]
    ((name, _, continued),) = after
    assert (name, continued) == (version, [*rows, {"more-loss": 0.125, "step": 5}])
