# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of checkpoints save, and how each library saves and loads it; a process's memory peak."""

import gc
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

Action = Callable[[], object]
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux alone tells a process's memory peak
KEEPS_NOTHING = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # fixed, so that what is freed goes back to the system at once


@dataclass(frozen=True)
class Size:
    """A model to save.

    Attributes:
        text: For the table.
        weights: The same of the weights alone.
        width: Of each layer; a layer has as many parameters as its square.
        layers: How many.
        has_optimizer: Whether AdamW's state is saved too.
    """

    text: str
    weights: str
    width: int
    layers: int
    has_optimizer: bool

    @property
    def blank(self) -> float:
        """MB that may be added to a peak for the pages that the allocator happens to keep: 2% of the weights."""
        return max(2.0, 0.02 * self.width**2 * self.layers * 4 / 2**20)

    def build(self, with_step: bool = True) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """The model and its optimizer. Its values are alike, since no way looks at them.

        Args:
            with_step: Whether the optimizer has taken a step, which gives it its state.
        """
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(self.layers)])
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.01)
        if not self.has_optimizer:
            return model, None
        optimizer = torch.optim.AdamW(model.parameters())
        if with_step:
            step(model, optimizer)
        return model, optimizer


SMALL = Size("10 M parameters with AdamW (126 MB)", "10 M parameters (42 MB)", 1024, 10, has_optimizer=True)
LARGE = Size("500 M parameters (2 GB)", "500 M parameters (2 GB)", 4096, 30, has_optimizer=False)
TINY = Size("a few", "a few", 8, 2, has_optimizer=True)
SIZES = {"tiny": TINY, "small": SMALL, "large": LARGE}


def step(model: Any, optimizer: Any) -> None:
    """One step, after which no gradient is left."""
    width = next(module for module in model.modules() if isinstance(module, nn.Linear)).in_features
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def torch_by_hand(path: str, model: Any, optimizer: Any) -> tuple[Action, Action]:
    """`torch.save`, synced, and `torch.load`."""

    def save() -> None:
        state = {"model": model.state_dict()} | ({"optimizer": optimizer.state_dict()} if optimizer else {})
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load() -> None:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        if optimizer:
            optimizer.load_state_dict(state["optimizer"])

    return save, load


def safetensors_by_hand(path: str, model: Any, optimizer: Any) -> tuple[Action, Action]:
    """`save_file`, synced, and `load_file`."""
    from safetensors.torch import load_file, save_file

    def save() -> None:
        save_file(model.state_dict(), path)
        sync(path)

    return save, lambda: model.load_state_dict(load_file(path))


def fabric(path: str, model: Any, optimizer: Any) -> tuple[Action, Action]:
    """One file of Fabric's: of `torch.save` or of safetensors, as its name says."""
    from fabric import Fabric

    return _facade(Fabric(accelerator="cpu", devices=1), path, model, optimizer)


def lightning(path: str, model: Any, optimizer: Any) -> tuple[Action, Action]:
    """One file of Lightning Fabric's."""
    from lightning.fabric import Fabric

    return _facade(Fabric(accelerator="cpu", devices=1), path, model, optimizer)


def _facade(fabric: Any, path: str, model: Any, optimizer: Any) -> tuple[Action, Action]:
    state = prepared(fabric, model, optimizer)
    return partial(fabric.save, path, state), partial(fabric.load, path, state)


def prepared(fabric: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """A state with what `fabric.setup` gives."""
    if optimizer is None:
        return {"model": fabric.setup(model)}
    return dict(zip(("model", "optimizer"), fabric.setup(model, optimizer), strict=True))


def accelerate(path: str, model: Any, optimizer: Any) -> tuple[Action, Action]:
    """A folder of files, named after what they hold."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*([model, optimizer] if optimizer else [model]))
    folder = f"{path}-folder"

    def save() -> None:
        accelerator.save_state(folder)
        Path(path).touch()

    return save, partial(accelerator.load_state, folder)


FILES: dict[str, dict[str, Callable[..., tuple[Action, Action]]]] = {
    "ckpt": {"raw": torch_by_hand, "fabric": fabric, "lightning": lightning, "accelerate": accelerate},
    "safetensors": {"raw": safetensors_by_hand, "fabric": fabric},
}


@contextmanager
def directory() -> Iterator[Path]:
    """A folder to write to, for a while."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY")) as path:
        yield Path(path)


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def peak(action: Action) -> float:
    """MB that this process grows by at most meanwhile."""
    gc.collect()
    CLEAR_REFS.write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(key: str) -> float:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 1024
