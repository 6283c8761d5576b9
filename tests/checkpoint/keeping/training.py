# SPDX-License-Identifier: Apache-2.0
"""A training that tests stop and go on with, in their own ranks and in jobs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.checkpoint import CheckpointManager, is_sharded


class Trained(NamedTuple):
    """Losses by step, and the parameters at the end."""

    losses: dict[int, float]
    parameters: list[torch.Tensor]


def train(
    fabric: Fabric,
    directory: Path | str,
    *,
    steps: int,
    before: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Trained:
    """Dropout, shuffling, Adam. Goes on from what is in `directory`.

    Args:
        fabric: Launched.
        directory: For the checkpoints.
        steps: How many, in all.
        before: Called with the number of each step before it is taken.
        **options: Of the `CheckpointManager`.
    """
    torch.manual_seed(5 + fabric.global_rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "fabric": fabric, "step": 0}
    losses: dict[int, float] = {}
    with CheckpointManager(directory, fabric=fabric, **options) as checkpoints:
        checkpoints.restore(state)
        while state["step"] < steps and not checkpoints.should_stop:
            for (x,) in loader:
                before(state["step"] + 1)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                fabric.backward(loss)
                optimizer.step()
                state["step"] += 1
                losses[state["step"]] = loss.item()
                checkpoints.save(state["step"], state, {"loss": loss})
                if checkpoints.should_stop or state["step"] == steps:
                    break
    return Trained(losses, [own_part(parameter).clone() for parameter in model.parameters()])


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter."""
    part: Any = parameter.detach()
    return part.to_local() if is_sharded(part) else part
