# SPDX-License-Identifier: Apache-2.0
"""Every benchmark, each in a process of its own: `python -m benchmarks [--quick] [--only step,ddp] [--write FILE]`."""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.report import INSTALLED, Row, table

SUBJECTS = (
    *("imports", "step", "steppability", "loader", "resume", "ddp", "sharded", "memory", "gather", "launch"),
    "checkpoint",
)
DISTRIBUTIONS = {"fabric": "fabric-runtime", "lightning": "lightning", "accelerate": "accelerate"}
ROOT = Path(__file__).resolve().parents[1]

RESULTS = """# What was measured

{date}, on {machine}, with {versions}.
Made by `python -m benchmarks --write benchmarks/RESULTS.md`, where `lightning` and `accelerate` are installed too.

Every figure is a ratio or a difference of paired samples: in each round all libraries run once, in a changing order,
and the median over the rounds counts. Absolute times are there for scale only. "By hand" is the same job in plain
PyTorch. The boundaries in brackets are 95% bootstrap intervals.
Accelerate's checkpoint is a folder of several files that it does not flush to the disk; it is listed for completeness.

{table}
"""


def run(subject: str, quick: bool) -> list[Row]:
    words = [sys.executable, "-m", f"benchmarks.{subject}", "--json", *(["--quick"] if quick else [])]
    # Every library's bytecode is cached, as it is wherever somebody has run it before.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environ)
    if done.returncode:
        return [Row(subject, "", f"failed with {done.returncode}", "", False)]
    return [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not how fast")
    parser.add_argument("--only", default=",".join(SUBJECTS), help="subjects, separated by commas")
    parser.add_argument("--write", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    rows: list[Row] = []
    for subject in options.only.split(","):
        found = run(subject, options.quick)
        print(table(found), end="\n\n", flush=True)
        rows += found
    if options.write:
        options.write.write_text(_results(rows))
    return int(any(row.met is False for row in rows))


def _results(rows: list[Row]) -> str:
    system = f"{platform.system()}, Python {platform.python_version()}"
    machine = f"a {os.cpu_count()}-core {platform.machine()} machine ({system})"
    names = ["torch", *(DISTRIBUTIONS[name] for name, there in INSTALLED.items() if there)]
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return RESULTS.format(date=datetime.date.today(), machine=machine, versions=versions, table=table(rows))


if __name__ == "__main__":
    sys.exit(main())
