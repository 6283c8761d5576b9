# SPDX-License-Identifier: Apache-2.0
"""Gathering for metrics on two ranks, beside `dist.all_gather` by hand; and asking in each step whether to stop."""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.ddp import RANKS, ROUNDS, measured_by_job
from benchmarks.libraries import quiet
from benchmarks.report import INSTALLED, NAMES, Row, in_turn, interval, main, median_difference, median_ratio, seconds

BATCH = 64
CLASSES = {"labels": 1, "logits of 1,000 classes": 1000, "logits of 30,000 classes": 30_000}
CALLS = 10  # gathers in one sample
WIDTH, ROWS = 1024, 128
STEP, VOTING, WAITING = "a step", "a step with any_rank(flag, wait=False)", "a step with any_rank(flag)"
BOUND = 1.01


def measure(quick: bool) -> list[Row]:
    times = measured_by_job("benchmarks.gather", rounds=3 if quick else 100)
    rows = [
        _gather_row(what, name, times)
        for what in CLASSES
        for name in ("fabric", "lightning", "accelerate")
        if f"{what}: {name}" in times
    ]
    return [*rows, _vote_row(VOTING, times, bounded=True), _vote_row(WAITING, times, bounded=False)]


def _gather_row(what: str, name: str, times: dict[str, list[float]]) -> Row:
    own, raw = times[f"{what}: {name}"], times[f"{what}: raw"]
    extra = median_difference(own, raw) / CALLS * 1e6
    low, high = interval(median_ratio, own, raw)
    of = statistics.median(raw) / CALLS * 1e6
    seen = f"x{median_ratio(own, raw):.2f} ({low:.2f} to {high:.2f}), {extra:+.0f} us of {of:.0f} us"
    return Row(f"gathering {what} of {BATCH} samples on {RANKS} ranks", NAMES[name], seen)


def _vote_row(what: str, times: dict[str, list[float]], *, bounded: bool) -> Row:
    ratio = median_ratio(times[what], times[STEP])
    low, high = interval(median_ratio, times[what], times[STEP])
    seen = f"x{ratio:.4f} (95%: {low:.4f} to {high:.4f}) of {statistics.median(times[STEP]) * 1e3:.0f} ms"
    bound = (f"x{BOUND} (interval reaches down to it)", low <= BOUND) if bounded else ("", None)
    return Row(f"{what}, on {RANKS} ranks", NAMES["fabric"], seen, *bound)


def job() -> None:
    """What each of the ranks does."""
    quiet()
    dist.init_process_group("gloo")
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    actions = {name: partial(_time, action) for name, action in [*_gathers(fabric), *_steps(fabric)]}
    times = in_turn(actions, int(os.environ[ROUNDS]), warmup=5)
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _time(action: Callable[[], object]) -> float:
    dist.barrier()
    return seconds(action)


def _gathers(fabric: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    loader = fabric.setup_dataloaders(DataLoader(range(BATCH * RANKS), batch_size=BATCH))
    for _ in loader:
        pass
    libraries: dict[str, Callable[[Tensor], object]] = {
        "raw": _by_hand,
        "fabric": lambda tensor: fabric.gather_for_metrics(tensor, loader),
    }
    if INSTALLED["lightning"]:
        libraries["lightning"] = _lightning()
    if INSTALLED["accelerate"]:
        libraries["accelerate"] = _accelerate()
    for what, classes in CLASSES.items():
        tensor = torch.randn(BATCH, classes)
        for name, gather in libraries.items():
            yield f"{what}: {name}", partial(_repeat, gather, tensor)


def _repeat(gather: Callable[[Tensor], object], tensor: Tensor) -> None:
    for _ in range(CALLS):
        gather(tensor)


def _by_hand(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def _lightning() -> Callable[[Tensor], object]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    return lambda tensor: fabric.all_gather(tensor).flatten(0, 1)


def _accelerate() -> Callable[[Tensor], object]:
    from accelerate import Accelerator

    return Accelerator(cpu=True).gather_for_metrics  # type: ignore[no-any-return]


def _steps(fabric: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        fabric.backward(model(x).square().mean())
        optimizer.step()

    def with_vote(wait: bool) -> None:
        step()
        fabric.any_rank(False, wait=wait)

    yield STEP, step
    yield VOTING, partial(with_vote, False)
    yield WAITING, partial(with_vote, True)


if __name__ == "__main__":
    if sys.argv[1:] == ["job"]:
        job()
    else:
        main(measure)
