# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.loggers.clients import LEVELDB, Client

READ = (
    LEVELDB
    + """
from wandb.proto.wandb_internal_pb2 import Record

def read():
    found = []
    for path in sorted(Path().glob("**/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        run = {"rows": [], "config": {}}
        for record in records(path, Record.FromString):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
                run["tags"] = list(record.run.tags)
            if kind == "history":
                items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                run["rows"].append({name: value for name, value in items.items() if not name.startswith("_")})
            if kind == "config":
                run["config"] |= {i.key: json.loads(i.value_json) for i in record.config.update}
            if kind == "metric" and record.metric.glob_name:
                run["x-axis"] = record.metric.step_metric
            if kind == "exit":
                run["code"] = record.exit.exit_code
        found.append(run)
    return found
"""
)

WANDB = Client(
    "WandbLogger",
    "wandb",
    'project="gpt", offline=True, name="large", tags=["a"]',
    READ,
    {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true"},
    devices=2,
    apart=True,
    again='dir="again"',  # folders are named after the second
)
WANDB.skip_unless_installed()
pytestmark = [pytest.mark.wandb, pytest.mark.ranks]


def test_a_run_offline(tmp_path: Path) -> None:
    said = WANDB.run(tmp_path)
    assert said.kinds == ["Run", "NullExperiment"]
    name, version = said.named
    assert name == "gpt"
    first, second = said.after
    assert first == {
        "id": version,
        "project": "gpt",
        "name": "large",
        "tags": ["a"],
        "rows": [{"loss": 0.5, "step": 3}, {"loss": 0.25, "step": 4}],
        "config": {"optimizer": {"lr": 0.5}, "rank": 0},
        "x-axis": "step",
        "code": 1,
    }
    assert (second["id"], second["rows"], second["code"]) == (version, [{"more-loss": 0.125, "step": 5}], 0)
