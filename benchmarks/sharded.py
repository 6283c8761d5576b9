# SPDX-License-Identifier: Apache-2.0
"""Sharded and tensor-parallel steps of at least 50 ms, and setting a model up, beside the same by hand."""

import gc
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ddp import ROUNDS, _time, measured_by_job
from benchmarks.libraries import quiet
from benchmarks.report import Row, in_turn, interval, main, median_ratio, seconds

WIDTH, BLOCKS, BATCH = 512, 4, 256
SMALL_WIDTH, FEW, MANY = 64, 12, 120  # blocks, for setting up
BOUND = 1.01
RANKS = {"FSDP": 2, "TP": 2, "HSDP": 4}


def measure(quick: bool) -> list[Row]:
    rows = []
    for kind, ranks in RANKS.items():
        times = measured_by_job("benchmarks.sharded", 3 if quick else 60, "step", kind, ranks=ranks)
        rows.append(_step_row(kind, ranks, times))
    times = measured_by_job("benchmarks.sharded", 2 if quick else 30, "setup", "FSDP")
    return [*rows, *_setup_rows(times)]


def _step_row(kind: str, ranks: int, times: dict[str, list[float]]) -> Row:
    ratio = median_ratio(times["fabric"], times["raw"])
    low, high = interval(median_ratio, times["fabric"], times["raw"])
    seen = f"x{ratio:.4f} (95%: {low:.4f} to {high:.4f}) of {statistics.median(times['raw']) * 1e3:.0f} ms"
    return Row(f"{kind} step on {ranks} ranks", "Fabric", seen, f"x{BOUND} (interval reaches down to it)", low <= BOUND)


def _setup_rows(times: dict[str, list[float]]) -> list[Row]:
    growth = {who: median_ratio(times[f"{who} {MANY}"], times[f"{who} {FEW}"]) for who in ("raw", "fabric")}
    rows = []
    for blocks in (FEW, MANY):
        fabric, raw = times[f"fabric {blocks}"], times[f"raw {blocks}"]
        seen = f"x{median_ratio(fabric, raw):.2f} of {statistics.median(raw) * 1e3:.0f} ms"
        rows.append(Row(f"FSDP setup of {6 * blocks} parameters on 2 ranks", "Fabric", seen))
    what = "FSDP setup with ten times the parameters: growth of its time"
    bound = f"x{growth['raw']:.1f}, as by hand, plus 10%"
    return [*rows, Row(what, "Fabric", f"x{growth['fabric']:.1f}", bound, growth["fabric"] <= 1.1 * growth["raw"])]


def job() -> None:
    """What each of the ranks does."""
    quiet()
    dist.init_process_group("gloo")
    what, kind = sys.argv[2:]
    if what == "step":
        steps = {"raw": _raw(kind), "fabric": _fabric(kind)}
        actions = {name: partial(_time, step) for name, step in steps.items()}
    else:
        setups = {"raw": _setup_by_hand(), "fabric": _setup_by_fabric()}
        actions = {
            f"{name} {blocks}": partial(_time_setup, setup, blocks)
            for name, setup in setups.items()
            for blocks in (FEW, MANY)
        }
    times = in_turn(actions, int(os.environ[ROUNDS]), warmup=5 if what == "step" else 1)
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


class Block(nn.Module):
    """Two layers between which a tensor group splits the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def _build(width: int, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(blocks)])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _step(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        backward(model(x).square().mean())
        optimizer.step()

    return step


def _split(module: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"up": ColwiseParallel, "down": RowwiseParallel}
    plan = {f"{number}.{name}": style() for number in range(BLOCKS) for name, style in styles.items()}
    return parallelize_module(module, mesh["tensor_parallel"], plan)


def _fully_shard(module: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in module:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _raw(kind: str) -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh

    model = _build(WIDTH, BLOCKS)
    if kind == "TP":
        _split(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",)))
    else:
        shape, names = {"FSDP": ((2,), ("shard",)), "HSDP": ((2, 2), ("replicate", "shard"))}[kind]
        _fully_shard(model, init_device_mesh("cpu", shape, mesh_dim_names=names))
    return _step(model, _optimizer(model), lambda loss: loss.backward())


def _fabric(kind: str) -> Callable[[], None]:
    from fabric import Fabric
    from fabric.strategies import FSDPStrategy, ModelParallelStrategy

    strategies: dict[str, Callable[[], Any]] = {
        "FSDP": lambda: FSDPStrategy(),
        "HSDP": lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
        "TP": lambda: ModelParallelStrategy(_split, tensor_parallel_size=2),
    }
    fabric = Fabric(accelerator="cpu", devices=RANKS[kind], strategy=strategies[kind]())
    fabric.launch()
    model = _build(WIDTH, BLOCKS)
    return _step(*fabric.setup(model, _optimizer(model)), fabric.backward)


def _setup_by_hand() -> Callable[[nn.Module], object]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))

    def setup(model: nn.Module) -> object:
        _fully_shard(model, mesh)
        return _optimizer(model)

    return setup


def _setup_by_fabric() -> Callable[[nn.Module], object]:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp")
    fabric.launch()
    return lambda model: fabric.setup(model, _optimizer(model))


def _time_setup(setup: Callable[[nn.Module], object], blocks: int) -> float:
    model = _build(SMALL_WIDTH, blocks)
    gc.collect()
    dist.barrier()
    return seconds(lambda: setup(model))


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        job()
    else:
        main(measure)
