# SPDX-License-Identifier: Apache-2.0
"""Import time of each library over `import torch`: whole processes in turn, less an empty interpreter.

Python's garbage collector is off for it: torch's import ends where a full collection of all that it made falls due, and
whatever allocates next, the library or the program, pays for it once. The last row leaves it on.
"""

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
COLLECTED = "collector on"


def measure(quick: bool) -> list[Row]:
    chosen = {who: statement for name, (who, statement) in STATEMENTS.items() if INSTALLED[name]}
    plain = {"empty": "pass", "torch": "import torch", **chosen}
    commands = {who: f"import gc; gc.disable(); {statement}" for who, statement in plain.items()}
    commands |= {COLLECTED: chosen["Fabric"], "torch, collected": "import torch"}
    actions = {who: lambda statement=statement: seconds(lambda: _run(statement)) for who, statement in commands.items()}
    times = in_turn(actions, 2 if quick else 11)
    empty = statistics.median(times["empty"])
    net = {who: [value - empty for value in values] for who, values in times.items()}
    rows = [_row(f"`{statement}`", who, net[who], net["torch"]) for who, statement in chosen.items()]
    return [*rows, _row(f"`{chosen['Fabric']}`, {COLLECTED}", "Fabric", net[COLLECTED], net["torch, collected"])]


def _row(what: str, who: str, times: list[float], torch: list[float]) -> Row:
    ratio = median_ratio(times, torch)
    seen = f"x{ratio:.3f} of `import torch` ({statistics.median(torch):.2f} s)"
    bound = (f"x{BOUND}", ratio <= BOUND) if who == "Fabric" and COLLECTED not in what else ("", None)
    return Row(what, who, seen, *bound)


def _run(statement: str) -> None:
    subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True)


if __name__ == "__main__":
    main(measure)
