# SPDX-License-Identifier: Apache-2.0
"""Real launches from a script, by each start method."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

HEAD = """
import json, os, sys
import torch
from fabric import Fabric

def write(fabric, **facts):
    with open(f"rank{fabric.global_rank}.json", "w") as file:
        json.dump(facts, file)
"""


def run(folder: Path, script: str, *flags: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run a script to its end; returns what it printed, and what its ranks wrote."""
    path = folder / "main.py"
    path.write_text(HEAD + textwrap.dedent(script))
    command = [sys.executable, str(path), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    facts = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    return done, facts


def test_the_script_goes_on_on_every_rank(tmp_path: Path) -> None:
    done, facts = run(
        tmp_path,
        """
        before = dict(os.environ)
        fabric = Fabric(accelerator="cpu", devices=2)
        fabric.launch()
        assert fabric.launch(lambda fabric, x: x, 3) == 3  # launched already: it only runs the function
        total = fabric.all_reduce(torch.tensor(fabric.global_rank + 1.0), reduce_op="sum").item()
        write(fabric, total=total, unchanged=dict(os.environ) == before, threads=torch.get_num_threads())
        """,
    )
    assert done.returncode == 0, done.stderr
    assert [fact["total"] for fact in facts] == [3.0, 3.0]
    assert all(fact["unchanged"] for fact in facts)


def test_further_fabrics_join_the_same_world(tmp_path: Path) -> None:
    done, facts = run(
        tmp_path,
        """
        first = Fabric(accelerator="cpu", devices=2)
        first.launch()
        second = Fabric(accelerator="cpu", devices=2, precision="bf16-mixed")
        second.launch()
        third = Fabric(accelerator="cpu")  # which says nothing
        third.launch()
        other = None
        try:
            Fabric(accelerator="cpu", devices=3).launch()
        except (RuntimeError, ValueError) as error:
            other = str(error)
        sums = [fabric.all_reduce(torch.ones(1), reduce_op="sum").item() for fabric in (second, third)]
        write(third, sums=sums, why=third.plan.environment.reason, other=other)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert [fact["sums"] for fact in facts] == [[2.0, 2.0], [2.0, 2.0]]
    assert facts[0]["why"] == "this process has launched before"
    assert "devices=3" in facts[0]["other"]
    assert "devices=3" in facts[1]["other"]


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_a_function_runs_on_every_seeded_rank_and_rank_0s_result_comes_back(tmp_path: Path, strategy: str) -> None:
    done, facts = run(
        tmp_path,
        f"""
        import random
        from fabric.utilities.seed import workers_are_seeded

        def train(fabric, x):
            drawn = [random.random(), torch.rand(1).item()]
            second = Fabric(accelerator="cpu", devices=2, strategy={strategy!r})
            second.launch(write)
            ones = second.all_reduce(torch.ones(1), reduce_op="sum").item()
            write(fabric, sum=ones, x=x, drawn=drawn, seed=torch.initial_seed(), workers=workers_are_seeded())
            return torch.full((1_000_000,), float(fabric.global_rank + x))

        if __name__ == "__main__":
            fabric = Fabric(accelerator="cpu", devices=2, strategy={strategy!r})
            fabric.seed_everything(7, workers=True)
            torch.rand(3)
            result = fabric.launch(train, 5)
            assert result.shape == (1_000_000,) and result[0] == 5.0
            print(json.dumps([random.random(), torch.rand(1).item()]))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert [(fact["sum"], fact["x"]) for fact in facts] == [(2.0, 5), (2.0, 5)]
    assert [fact["drawn"] for fact in facts] == [json.loads(done.stdout)] * 2
    assert [(fact["seed"], fact["workers"]) for fact in facts] == [(7, True)] * 2


def test_an_overridden_run_launches(tmp_path: Path) -> None:
    done, facts = run(
        tmp_path,
        """
        class Trainer(Fabric):
            def run(self, x):
                write(self, sum=self.all_reduce(torch.ones(1), reduce_op="sum").item(), x=x)
                return "result"

        class Louder(Trainer):
            def run(self, x):
                return super().run(x).upper()

        if __name__ == "__main__":
            print(Louder(accelerator="cpu", devices=2, strategy="ddp_spawn").run(7))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "RESULT\n"
    assert [(fact["sum"], fact["x"]) for fact in facts] == [(2.0, 7), (2.0, 7)]
