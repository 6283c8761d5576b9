# SPDX-License-Identifier: Apache-2.0
"""A 2-process job on this machine from start to exit, doing one barrier: whole processes in turn.

The floor is a shell loop: two plain PyTorch processes with the rank variables set.
"""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.report import INSTALLED, Row, in_turn, main, median_ratio, seconds

RANKS = 2
LOOP = "f = Fabric(accelerator='cpu', devices=2); f.launch(); f.barrier()\n"
SCRIPTS = {
    "raw": "import torch.distributed as d\nd.init_process_group('gloo'); d.barrier(); d.destroy_process_group()\n",
    "accelerate": "from accelerate import Accelerator\na = Accelerator(cpu=True); a.wait_for_everyone()\n",
    "lightning": "from lightning.fabric import Fabric\n" + LOOP,
    "fabric": "from fabric import Fabric\n" + LOOP,
}
WHO = {
    "shell loop": "PyTorch by hand",
    "import torch": "PyTorch by hand",
    "torchrun": "torchrun",
    "accelerate launch": "Accelerate",
    "lightning": "Lightning Fabric",
    "python main.py": "Fabric",
    "fabric run": "Fabric",
}


def measure(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        for name, text in SCRIPTS.items():
            Path(directory, f"{name}_job.py").write_text("import torch\n" + text)
        actions = {way: partial(seconds, job) for way, job in _ways(Path(directory)).items()}
        times = in_turn(actions, 1 if quick else 9)
    return [_row(way, times) for way in times if way not in ("shell loop", "import torch")]


def _row(way: str, times: dict[str, list[float]]) -> Row:
    floor = times["shell loop"]
    ratio = median_ratio(times[way], floor)
    seen = f"x{ratio:.2f} of the shell loop ({statistics.median(floor):.2f} s)"
    bound: tuple[str, bool | None] = ("", None)
    if way == "python main.py":
        limits = [1.1 * (a + b) / a for a, b in zip(floor, times["import torch"], strict=True)]
        limit = statistics.median(limits)
        bound = (f"x{limit:.2f} (the shell loop plus `import torch`, plus 10%)", ratio <= limit)
    elif way == "fabric run":
        limit = min(1.1, median_ratio(times["torchrun"], floor))
        bound = (f"x{limit:.2f} (x1.1, and faster than torchrun)", ratio <= limit)
    return Row(f"2-process job with one barrier: {way}", WHO[way], seen, *bound)


def _ways(directory: Path) -> dict[str, Callable[[], object]]:
    tools = Path(sys.executable).parent
    raw, fabric = directory / "raw_job.py", directory / "fabric_job.py"
    ways: dict[str, Callable[[], object]] = {
        "shell loop": lambda: _shell_loop(raw),
        "import torch": lambda: _command(sys.executable, "-c", "import torch"),
        "torchrun": lambda: _command(tools / "torchrun", f"--nproc-per-node={RANKS}", "--standalone", raw),
    }
    if INSTALLED["accelerate"]:
        words = ["launch", "--cpu", "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
        script = directory / "accelerate_job.py"
        ways["accelerate launch"] = lambda: _command(tools / "accelerate", *words, "--num_processes", RANKS, script)
    if INSTALLED["lightning"]:
        ways["lightning"] = lambda: _command(sys.executable, directory / "lightning_job.py")
    ways["python main.py"] = lambda: _command(sys.executable, fabric)
    ways["fabric run"] = lambda: _command(tools / "fabric", "run", "--devices", RANKS, fabric)
    return ways


def _environ(**more: object) -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}


def _command(*words: object) -> None:
    done = subprocess.run([*map(str, words)], env=_environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(map(str, words))}` ended with {done.returncode}:\n{done.stderr}")


def _shell_loop(script: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": RANKS}
    environs = [_environ(**place, RANK=rank, LOCAL_RANK=rank) for rank in range(RANKS)]
    jobs = [subprocess.Popen([sys.executable, str(script)], env=environ) for environ in environs]
    codes = [job.wait() for job in jobs]
    if any(codes):
        raise RuntimeError("the shell loop failed")


if __name__ == "__main__":
    main(measure)
