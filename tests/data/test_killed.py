# SPDX-License-Identifier: Apache-2.0
"""A run over a stream, killed in the middle of an epoch, with augmentation in workers, goes on to the bit.

Data with indices: tests/checkpoint/test_resume.py.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from fabric import Fabric

ROOT = Path(__file__).resolve().parents[2]


def augmented(number: int) -> torch.Tensor:
    noise = torch.rand(3) + random.random() + float(np.random.rand())
    return torch.full((3,), float(number)) + noise


class Streamed(IterableDataset[Any]):
    start = 0
    last = -1

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.start = self.start, 0
        for number in range(start, 24):
            self.last = number
            yield augmented(number)

    def state_dict(self) -> dict[str, int]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["last"] + 1


def train(path: str, *, die_at: int | None) -> Any:
    """Two epochs; saves after each step."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(11, workers=True, verbose=False)
    loader = fabric.setup_dataloaders(DataLoader(Streamed(), batch_size=3, num_workers=2))
    model, optimizer = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(3, 1)), None
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "fabric": fabric, "step": 0, "epoch": 0}
    if os.path.exists(path):
        fabric.load(path, state)
    while state["epoch"] < 2:
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            state["step"] += 1
            fabric.save(path, state)
            if state["step"] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        state["epoch"] += 1
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = train(str(tmp_path / "whole.pt"), die_at=None)
    path = str(tmp_path / "killed.pt")
    program = f"from tests.data.test_killed import train; train({path!r}, die_at=11)"
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert torch.load(path)["step"] == 11
    assert train(path, die_at=None) == whole
