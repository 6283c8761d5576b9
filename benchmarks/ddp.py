# SPDX-License-Identifier: Apache-2.0
"""A DDP step of at least 50 ms on two ranks, beside `DistributedDataParallel` by hand; steps of all in turn."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.libraries import quiet
from benchmarks.report import INSTALLED, NAMES, Row, in_turn, interval, main, median_ratio, seconds

RANKS = 2
WIDTH, BATCH = 1024, 128
BOUND = 1.01
ROUNDS = "BENCHMARK_ROUNDS"


def measure(quick: bool) -> list[Row]:
    times = measured_by_job("benchmarks.ddp", rounds=3 if quick else 150)
    return [_row(name, times) for name in times if name != "raw"]


def measured_by_job(module: str, rounds: int, *more: str, ranks: int = RANKS, **environ: str) -> dict[str, list[float]]:
    """Run `module job` on ranks under torchrun, which every library understands, and read what rank 0 measured.

    Args:
        module: Of which `job` is run.
        rounds: How often.
        *more: Further words for it.
        ranks: Number of ranks.
        **environ: Further environment variables.
    """
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module, "job", *more]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", ROUNDS: str(rounds), **environ}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, *words], env=environ, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the job ended with {done.returncode}:\n{done.stderr}")
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def _row(name: str, times: dict[str, list[float]]) -> Row:
    ratio = median_ratio(times[name], times["raw"])
    low, high = interval(median_ratio, times[name], times["raw"])
    seen = f"x{ratio:.4f} (95%: {low:.4f} to {high:.4f}) of {statistics.median(times['raw']) * 1e3:.0f} ms"
    bound = (f"x{BOUND} (interval reaches down to it)", low <= BOUND) if name == "fabric" else ("", None)
    return Row("DDP step on 2 ranks", NAMES[name], seen, *bound)


def job() -> None:
    """What each of the ranks does."""
    quiet()
    steps = {"raw": _raw()}
    for name, setup in {"fabric": _fabric, "lightning": _lightning, "accelerate": _accelerate}.items():
        if INSTALLED[name]:
            steps[name] = setup()
    actions = {name: partial(_time, step) for name, step in steps.items()}
    times = in_turn(actions, int(os.environ[ROUNDS]), warmup=5)
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _time(step: Callable[[], None]) -> float:
    dist.barrier()
    return seconds(step)


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _step(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        backward(model(x).square().mean())
        optimizer.step()

    return step


def _raw() -> Callable[[], None]:
    dist.init_process_group("gloo")
    model, optimizer = _build()
    return _step(DistributedDataParallel(model), optimizer, lambda loss: loss.backward())


def _fabric() -> Callable[[], None]:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    return _step(*fabric.setup(*_build()), fabric.backward)


def _lightning() -> Callable[[], None]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    return _step(*fabric.setup(*_build()), fabric.backward)


def _accelerate() -> Callable[[], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return _step(*accelerator.prepare(*_build()), accelerator.backward)


if __name__ == "__main__":
    if sys.argv[1:] == ["job"]:
        job()
    else:
        main(measure)
