# SPDX-License-Identifier: Apache-2.0
"""Never half: 200 saves that are killed at random moments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# By what is saved, as `tests/checkpoint/kills.py` knows it.
ON_ONE_RANK = {
    "file": 25,
    "file with sums": 10,
    "file beside": 20,
    "weights": 25,
    "in turn": 40,
    "many files": 20,
    "many folders": 10,
}
ON_TWO_RANKS = {"folder": 30, "folder beside": 20}


@pytest.mark.parametrize("kills", [ON_ONE_RANK, pytest.param(ON_TWO_RANKS, marks=pytest.mark.ranks)])
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(kills: dict[str, int], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.kills", str(tmp_path), "1", json.dumps(kills)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=250)


def test_there_are_200() -> None:
    assert sum(ON_ONE_RANK.values()) + sum(ON_TWO_RANKS.values()) == 200
