# SPDX-License-Identifier: Apache-2.0
"""The memory peak of each way to begin with a sharded model, per rank, against the whole model (Linux only)."""

import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ddp import measured_by_job
from benchmarks.libraries import quiet
from benchmarks.report import Row, main

WIDTH, BLOCKS = 1024, 32  # 128 MiB
MIB_OF_BLOCK = WIDTH * WIDTH * 4 / 2**20
SPARE = 0.04  # of the model: pages that the allocator happens to keep, and what gloo sends with
NAMES = {
    "real": "made for real on each rank",
    "constructor": "on the meta device, from its constructor",
    "rank 0": "on the meta device, from rank 0",
    "file": "on the meta device, then from a full checkpoint",
    "folder": "on the meta device, then from a sharded checkpoint",
}


def measure(quick: bool) -> list[Row]:
    if not Path("/proc/self/clear_refs").exists():
        return []
    blocks = BLOCKS // 4 if quick else BLOCKS
    rows = []
    for ranks in (1, 2) if quick else (1, 2, 4):
        # A fixed threshold, so that what is freed goes back to the system at once.
        peaks = measured_by_job("benchmarks.memory", 1, str(blocks), ranks=ranks, MALLOC_MMAP_THRESHOLD_="65536")
        rows += [_row(way, peaks[way], ranks, blocks) for way in NAMES]
    return rows


def _row(way: str, peaks: list[float], ranks: int, blocks: int) -> Row:
    model = blocks * MIB_OF_BLOCK
    others = max(peaks[1:], default=peaks[0])
    seen = f"rank 0 x{peaks[0] / model:.2f}, others x{others / model:.2f}" if ranks > 1 else f"x{peaks[0] / model:.2f}"
    what = f"memory peak over the whole model's ({model:.0f} MiB), {ranks} rank{'s' * (ranks > 1)}: {NAMES[way]}"
    if way == "real":
        return Row(what, "Fabric", seen)
    # The pages of a mapped file count, though the system takes them back whenever it needs them.
    mapped = way == "file"
    most = 1 / ranks + 2 / blocks + SPARE + mapped
    held = "a shard, a block, one in transit" + ", the mapped file" * mapped
    but = ", and rank 0's own model" if way == "rank 0" else ""
    met = (others if but else max(peaks)) <= most * model
    return Row(what, "Fabric", seen, f"x{most:.2f} ({held}{but})", met)


def job() -> None:
    """What each of the ranks does."""
    quiet()
    peaks = {}
    with tempfile.TemporaryDirectory() as directory:
        box = [directory]
        ways = _ways(box)
        for way in ("prepare", *NAMES):
            ways[way](2)  # loads what is loaded at first use
        blocks = int(sys.argv[2])
        ways["prepare"](blocks)
        for way in NAMES:
            peaks[way] = _peaks(lambda way=way: ways[way](blocks))
        if dist.get_rank() == 0:
            print(json.dumps(peaks))
        dist.barrier()
    dist.destroy_process_group()


def _ways(box: list[str]) -> dict[str, Callable[[int], Any]]:
    from fabric import Fabric
    from fabric.strategies import FSDPStrategy

    ranks = int(os.environ["WORLD_SIZE"])
    kinds = {
        layout: Fabric(accelerator="cpu", devices=ranks, strategy=FSDPStrategy(state_dict_type=layout))
        for layout in ("full", "sharded")
    }
    for fabric in kinds.values():
        fabric.launch()
    dist.broadcast_object_list(box, src=0)

    def begin(empty: bool, blocks: int) -> Any:
        fabric = kinds["full"]
        with fabric.init_module(empty_init=empty):
            model = _build(blocks)
        return fabric.setup(model)

    def prepare(blocks: int) -> None:
        model = begin(True, blocks)
        for layout, fabric in kinds.items():
            fabric.save(Path(box[0]) / f"{layout}-{blocks}", {"model": model})

    def from_checkpoint(layout: Any, blocks: int) -> Any:
        fabric = kinds[layout]
        with fabric.init_module(empty_init=True):
            model = _build(blocks)
        model = fabric.setup(model)
        fabric.load(Path(box[0]) / f"{layout}-{blocks}", {"model": model})
        return model

    return {
        "prepare": prepare,
        "real": lambda blocks: begin(False, blocks),
        "constructor": lambda blocks: begin(True, blocks),
        "rank 0": lambda blocks: begin(not kinds["full"].is_global_zero, blocks),
        "file": lambda blocks: from_checkpoint("full", blocks),
        "folder": lambda blocks: from_checkpoint("sharded", blocks),
    }


class Block(nn.Module):
    """A layer that is a unit by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).relu()


def _build(blocks: int) -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(blocks)])


def _peaks(begin: Callable[[], Any]) -> list[float]:
    """MiB by which each rank grows at most."""
    gc.collect()
    before = _status("VmRSS")
    dist.barrier()
    _restart_peak()
    model = begin()
    own = _status("VmHWM") - before
    del model
    gc.collect()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks


def _restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> float:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        job()
    else:
        main(measure)
