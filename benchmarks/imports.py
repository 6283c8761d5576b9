# SPDX-License-Identifier: Apache-2.0
"""Import time of each library over `import torch`: whole processes in turn, less an empty interpreter."""

import statistics
import subprocess
import sys

from benchmarks.report import INSTALLED, Row, in_turn, main, median_ratio, seconds

STATEMENTS = {
    "fabric": ("Fabric", "from fabric import Fabric"),
    "lightning": ("Lightning Fabric", "from lightning.fabric import Fabric"),
    "accelerate": ("Accelerate", "from accelerate import Accelerator"),
}
BOUND = 1.05


def measure(quick: bool) -> list[Row]:
    chosen = {who: statement for name, (who, statement) in STATEMENTS.items() if INSTALLED[name]}
    commands = {"empty": "pass", "torch": "import torch", **chosen}
    actions = {who: lambda statement=statement: seconds(lambda: _run(statement)) for who, statement in commands.items()}
    times = in_turn(actions, 2 if quick else 15)
    empty = statistics.median(times["empty"])
    net = {who: [value - empty for value in values] for who, values in times.items()}
    rows = []
    for who, statement in chosen.items():
        ratio = median_ratio(net[who], net["torch"])
        seen = f"x{ratio:.3f} of `import torch` ({statistics.median(net['torch']):.2f} s)"
        bound = (f"x{BOUND}", ratio <= BOUND) if who == "Fabric" else ("", None)
        rows.append(Row(f"`{statement}`", who, seen, *bound))
    return rows


def _run(statement: str) -> None:
    subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True)


if __name__ == "__main__":
    main(measure)
