# SPDX-License-Identifier: Apache-2.0
"""Saving and loading a folder from two ranks under FSDP, beside `fully_shard` and PyTorch's checkpoints by hand."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.checkpoint_rows import held_rows_of, peak_rows, time_rows
from benchmarks.checkpoint_ways import (
    CLEAR_REFS,
    KEEPS_NOTHING,
    SIZES,
    Action,
    Size,
    directory,
    peak,
    prepared,
    step,
    sync,
)
from benchmarks.ddp import ROUNDS, measured_by_job
from benchmarks.libraries import quiet
from benchmarks.report import Row, in_turn, seconds

RANKS = 2
WHAT = ("save", "load")


def measure(name: str, rounds: int) -> list[Row]:
    """Times, memory peaks per rank, and how long a save in the background holds the loop.

    Args:
        name: Of the size.
        rounds: How often each is timed.
    """
    size = SIZES[name]
    where = f"folder, {RANKS} ranks under FSDP, {size.text}"
    times = measured_by_job("benchmarks.checkpoint_folder", rounds, "times", name, ranks=RANKS)
    rows = [row for what in WHAT for row in time_rows(f"{what} {where}", _of(what, times))]
    if CLEAR_REFS.exists():
        peaks = {library: _peaks_of(library, name) for library in JOBS}
        for what in WHAT:
            highest = {library: max(of_library[what]) for library, of_library in peaks.items()}
            rows += peak_rows(f"memory peak of {what}, per rank: {where}", highest, size)
    held = {"blocking": times["save fabric"], "held": times["held fabric"], "held by hand": times["held raw"]}
    return [*rows, *held_rows_of(f"background save of a {where} holds the loop", held)]


def _peaks_of(library: str, name: str) -> dict[str, list[float]]:
    return measured_by_job("benchmarks.checkpoint_folder", 1, "peaks", name, library, ranks=RANKS, **KEEPS_NOTHING)


def _of(what: str, times: dict[str, list[float]]) -> dict[str, list[float]]:
    return {library: times[f"{what} {library}"] for library in JOBS}


def job() -> None:
    """What each of the ranks does."""
    quiet()
    dist.init_process_group("gloo")
    kind, name, *libraries = sys.argv[2:]
    with directory() as own:
        place = [own]
        dist.broadcast_object_list(place, src=0)
        if kind == "times":
            found: Any = _times(SIZES[name], place[0])
        else:
            for size in (SIZES["tiny"], SIZES[name]):  # the first one loads what is loaded at first use
                found = _peaks(size, place[0], libraries[0])
        if dist.get_rank() == 0:
            print(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


def _times(size: Size, place: Path) -> dict[str, list[float]]:
    actions: dict[str, Callable[[], float]] = {}
    for library, build in JOBS.items():
        ways = build(size, place / library)
        actions |= {f"{what} {library}": ways[what] for what in ("save", "held", "load")}
    return in_turn(actions, int(os.environ[ROUNDS]))


def _peaks(size: Size, place: Path, library: str) -> dict[str, list[float]]:
    """MB for each rank."""
    ways = JOBS[library](size, place / f"{library}-{size.width}")
    found = {}
    for what in WHAT:
        ranks: list[Any] = [None] * RANKS
        own = peak(ways[what])
        dist.all_gather_object(ranks, own)
        found[what] = ranks
    return found


def _ways(path: Path, save: Action, load: Action, start: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    """Seconds of each, all ranks beginning together, and until the last one has done."""

    def together(action: Action) -> float:
        dist.barrier()
        return seconds(lambda: (action(), dist.barrier()))

    def anew(action: Callable[[], float]) -> float:
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            os.sync()  # what others left to be written is not in the way
        return action()

    def of_saved() -> float:
        if not path.exists():  # all ranks see the same: nobody has begun with anything else
            save()
        return together(load)

    def held() -> float:
        handles: list[Any] = []
        dist.barrier()
        time = seconds(lambda: handles.append(start()))
        handles[0].result()
        dist.barrier()
        return time

    return {
        "save": partial(anew, partial(together, save)),
        "load": of_saved,
        "held": partial(anew, held),
    }


def _raw(size: Size, path: Path) -> dict[str, Callable[[], float]]:
    """`dcp.save` syncs what it writes, but not the folder: that is done here, so that both promise the same."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any
    model, optimizer = size.build(with_step=False)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = _remade(model, optimizer)
    group = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))

    def save() -> None:
        dcp.save(state(), checkpoint_id=path)
        if dist.get_rank() == 0:
            sync(path)

    def load() -> None:
        values = state()
        dcp.load(values, checkpoint_id=path)
        set_state_dict(model, optimizers, model_state_dict=values["model"], optim_state_dict=values["optimizer"])

    return _ways(path, save, load, lambda: dcp.async_save(state(), checkpoint_id=path, process_group=group))


def _remade(model: Any, optimizer: Any) -> list[Any]:
    """An optimizer over the shards that has taken a step; none where the size has none."""
    if optimizer is None:
        return []
    made = type(optimizer)(model.parameters())
    step(model, made)
    model.reshard()
    return [made]


def _fabric(size: Size, path: Path) -> dict[str, Callable[[], float]]:
    from fabric import Fabric

    own = Fabric(accelerator="cpu", devices=RANKS, strategy="fsdp")
    own.launch()
    state = prepared(own, *size.build(with_step=False))
    if size.has_optimizer:
        step(state["model"], state["optimizer"])
    return _ways(
        path,
        partial(own.save, path, state),
        partial(own.load, path, state),
        partial(own.save, path, state, blocking=False),
    )


JOBS = {"raw": _raw, "fabric": _fabric}


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        job()
