# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import LEVELDB, Client

READ = (
    LEVELDB
    + """
import yaml
from swanlab.proto.swanlab.record.v1.record_pb2 import Record

def read():
    found = []
    for path in sorted(Path("runs").glob("run-*/*.swanlab"), key=lambda path: path.stat().st_mtime):
        config = path.parent / "files/config.yaml"
        values = yaml.safe_load(config.read_text()) if config.exists() else {}
        run = {"rows": [], "config": {name: entry["value"] for name, entry in values.items()}}
        for record in records(path, Record.FromString):
            if record.HasField("start"):
                run |= {"id": record.start.id, "project": record.start.project, "name": record.start.name}
            if record.HasField("scalar"):
                run["rows"].append([record.scalar.key, record.scalar.step, record.scalar.value.number])
            if record.HasField("finish"):
                run |= {"state": record.finish.state, "error": record.finish.error}
        found.append(run)
    return found
"""
)

SWANLAB = Client("SwanLabLogger", "swanlab", '"gpt", name="large", mode="offline", log_dir="runs"', READ, apart=True)
SWANLAB.skip_unless_installed()
pytestmark = pytest.mark.swanlab


def test_a_run_offline(tmp_path: Path) -> None:
    said = SWANLAB.run(tmp_path)
    assert said.kinds == ["Run"]
    name, version = said.named
    assert name == "gpt"
    first, second = said.after
    assert first == {
        "id": version,
        "project": "gpt",
        "name": "large",
        "rows": [["loss", 3, 0.5], ["loss", 4, 0.25]],
        "config": {"optimizer": {"lr": 0.5}, "rank": 0},
        "state": 2,
        "error": "the run failed",
    }
    assert (second["id"], second["rows"]) == (version, [["more-loss", 5, 0.125]])
    assert (second["state"], second["error"]) == (1, "")
