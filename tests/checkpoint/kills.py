# SPDX-License-Identifier: Apache-2.0
"""A program that kills saves at random moments, and looks at what is there then: `python -m tests.checkpoint.kills`.

It is one thread that has imported everything, so that a job to kill is a fork: the ranks save one step after the other,
and each step is in every number that they save. Whatever is found must be one step as a whole: the last one that was
reported complete, or the one in progress.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import nn

from fabric import Fabric
from fabric.checkpoint import CheckpointManager
from fabric.strategies import SingleDeviceStrategy
from tests.checkpoint.sharded import ByHand
from tests.ranks import RankContext

PATIENCE = 20.0  # seconds for a rank to see that the other one is gone


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 200)
        self.down = nn.Linear(200, 128)


class Folders(SingleDeviceStrategy):
    """One process that writes folders."""

    state_dict_type = "sharded"


def fill(net: nn.Module, optimizer: Any, step: int) -> None:
    """Every number that is saved becomes the step."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            group["lr"] = float(step)
            for parameter in group["params"]:
                parameter.fill_(step)
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)


def found(net: nn.Module, optimizer: Any, step: int) -> set[float]:
    """All numbers of a state."""
    values = {float(step)} | {group["lr"] for group in optimizer.param_groups}
    for parameter in net.parameters():
        for tensor in (parameter, optimizer.state[parameter]["momentum_buffer"]):
            values |= set(tensor.unique().tolist())
    return values


Save = Callable[[Fabric, Path, dict[str, Any]], None]


def plainly(**options: Any) -> Save:
    return lambda fabric, place, state: fabric.save(place / "a", state, **options) and None


def beside_the_loop(fabric: Fabric, place: Path, state: dict[str, Any]) -> None:
    handle = fabric.save(place / "a", state, blocking=False)
    fill(state["net"], state["optimizer"], -1)
    handle.result()


def in_turn(fabric: Fabric, place: Path, state: dict[str, Any]) -> None:
    """A file takes the place of a folder, of either kind, and the other way round."""
    fabric.save(place / "a", state, format=random.choice(["torch", "sharded", "safetensors"]))


def as_one_of_many(fabric: Fabric, place: Path, state: dict[str, Any]) -> None:
    with CheckpointManager(place, fabric=fabric, keep_last=2, signals=()) as checkpoints:
        checkpoints.save(state["step"], state)


# How it is saved, on how many ranks, and by which strategy.
KINDS: dict[str, tuple[Save, int, Callable[[], Any]]] = {
    "file": (plainly(), 1, SingleDeviceStrategy),
    "file with sums": (plainly(checksum=True), 1, SingleDeviceStrategy),
    "weights": (plainly(format="safetensors", max_shard_size=60_000), 1, SingleDeviceStrategy),
    "folder": (plainly(), 2, lambda: ByHand("fsdp2", "sharded")),
    "file beside": (beside_the_loop, 1, SingleDeviceStrategy),
    "folder beside": (beside_the_loop, 2, lambda: ByHand("fsdp2", "sharded")),
    "in turn": (in_turn, 1, SingleDeviceStrategy),
    "many files": (as_one_of_many, 1, SingleDeviceStrategy),
    "many folders": (as_one_of_many, 1, Folders),
}


class Job:
    """Ranks that save for ever, or some steps only.

    Args:
        kind: One of `KINDS`.
        place: Where to.
        first: The first step.
        count: How many steps; None never ends.
    """

    def __init__(self, kind: str, place: Path, first: int, count: int | None = None) -> None:
        self._reports, report = os.pipe()
        self.first = first
        self.pids: list[int] = []
        _, world_size, _ = KINDS[kind]
        meeting = place.parent / f"job-{first}-{random.getrandbits(32):08x}"
        meeting.mkdir()
        seed = random.random()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                random.seed(seed)
                _run(lambda rank=rank: _work(kind, place, first, count, RankContext(rank, world_size, meeting), report))
            self.pids.append(pid)
        os.close(report)
        if os.read(self._reports, 1) != b"r":
            raise AssertionError("The job did not begin.")

    def kill(self, longest: float) -> None:
        """After a while; all ranks, or one, and the others end when they have seen it."""
        time.sleep(random.random() * longest)
        victims = random.choice([self.pids, self.pids[:1], self.pids[1:] or self.pids])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> list[int]:
        """The exit codes; what does not end is killed, and an error here."""
        codes, late = [], time.monotonic() + PATIENCE
        for pid in self.pids:
            while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < late:
                time.sleep(0.002)
            if not ended[0]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise AssertionError("A rank hung when the other one was gone.")
            codes.append(ended[1])
        return codes

    def complete(self) -> int:
        """The last step that was reported complete, or the one before the first."""
        with os.fdopen(self._reports, "rb") as reports:
            return self.first - 1 + len(reports.read())


def _run(work: Callable[[], None]) -> None:
    """The end of a fork. A rank whose peer was killed fails, in many ways."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        if "VERBOSE" in os.environ:
            traceback.print_exc()
    finally:
        os._exit(code)


def _work(kind: str, place: Path, first: int, count: int | None, context: RankContext, report: int) -> None:
    save, _, strategy = KINDS[kind]
    os.chdir(context.directory)
    fabric = context.fabric(strategy=strategy())
    net = Net()
    module, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9))
    os.write(report, b"r") if context.rank == 0 else None
    for step in itertools.count(first) if count is None else range(first, first + count):
        fill(module, optimizer, step)
        save(fabric, place, {"net": module, "optimizer": optimizer, "step": step})
        os.write(report, b".") if context.rank == 0 else None


def look(fabric: Fabric, place: Path, kind: str) -> int:
    """The step that is there, as a whole."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    state: dict[str, Any] = {"net": net, "optimizer": optimizer, "step": 0}
    if kind.startswith("many"):
        with CheckpointManager(place, fabric=fabric, signals=()) as checkpoints:
            kept = checkpoints.kept()
            for entry in kept[:-1]:
                checkpoints.restore(state, entry.step)
                assert found(net, optimizer, state["step"]) == {entry.step}
            assert checkpoints.restore(state) == {}
            assert state["step"] == kept[-1].step
    else:
        fabric.load(place / "a", state)
    assert found(net, optimizer, state["step"]) == {state["step"]}, found(net, optimizer, state["step"])
    return int(state["step"])


def files(place: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(place))


def check(kind: str, kills: int, directory: Path, fabric: Fabric) -> None:
    """Kill so many jobs, and look after each."""
    place = directory / kind
    place.mkdir()
    first = Job(kind, place, 1, 3)
    began = time.monotonic()
    assert set(first.wait()) == {0}
    longest = 1.5 * (time.monotonic() - began)  # until a kill
    clean = max(files(place), 8 if kind == "in turn" else 0)
    step, unsaved, seen = look(fabric, place, kind), 0, set()
    for _ in range(kills):
        job = Job(kind, place, step + 1)
        job.kill(longest)
        complete = job.complete()
        step = look(fabric, place, kind)
        assert complete <= step <= complete + 1, (complete, step)
        unsaved = unsaved + 1 if step == job.first - 1 else 0
        seen.add((complete - job.first + 1, step - complete))
        assert files(place) <= clean * (unsaved + 3), sorted(place.rglob("*"))
    assert len(seen) > 1, "all kills found the same, so they came too early"
    assert set(Job(kind, place, step + 1, 3).wait()) == {0}
    assert look(fabric, place, kind) == step + 3
    left = [str(path) for path in place.rglob("*") if path.name.endswith((".tmp", ".old"))]
    assert not left, left
    assert files(place) <= clean, sorted(place.rglob("*"))


def _import_the_rest(fabric: Fabric, directory: Path) -> None:
    """What is imported when it is first used, so that not each fork has to."""
    net, optimizer = fabric.setup(Net(), torch.optim.SGD([torch.zeros(1)], lr=1.0))
    for format in ("torch", "sharded", "safetensors"):
        fabric.save(directory / format, {"net": net, "optimizer": optimizer, "step": 0}, format=format)
        fabric.load(directory / format, {"net": net, "optimizer": optimizer})


def main(directory: Path, seed: int, kills: dict[str, int]) -> None:
    """Each kind of saves, with so many kills."""
    random.seed(seed)
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    _import_the_rest(fabric, directory)
    for kind, count in kills.items():
        check(kind, count, directory, fabric)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
