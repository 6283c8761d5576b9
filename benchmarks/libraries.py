# SPDX-License-Identifier: Apache-2.0
"""The same small training job set up by hand and by each library, for the benchmarks of one step."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import INSTALLED


@dataclass(frozen=True)
class Subject:
    """A set-up job: what a loop calls, and where the library's own files are."""

    model: Callable[[Tensor], Tensor]
    optimizer: Any
    backward: Callable[[Tensor], object]
    roots: tuple[str, ...] = ()
    loader: Iterable[Any] = ()


def quiet() -> None:
    """One thread, and no warnings of the libraries between the figures."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose step is all overhead: the library's share of it is as large as it gets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def subjects(precision: str, build: Callable[[], Any] = tiny, loader: Any = ()) -> dict[str, Subject]:
    """Each installed library's job, `raw` first."""
    made = {"raw": _raw(precision, build, loader)}
    setups = {"fabric": _fabric, "lightning": _lightning, "accelerate": _accelerate}
    for name, setup in setups.items():
        if INSTALLED[name]:
            made[name] = setup(precision, build, loader)
    return made


def _raw(precision: str, build: Callable[[], Any], loader: Any) -> Subject:
    model, optimizer = build()
    forward: Callable[[Tensor], Tensor] = model
    if precision == "bf16-mixed":

        def forward(inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(inputs).float()

    return Subject(forward, optimizer, lambda loss: loss.backward(), loader=loader)


def _fabric(precision: str, build: Callable[[], Any], loader: Any) -> Subject:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    loader = fabric.setup_dataloaders(loader) if loader else ()
    return Subject(*fabric.setup(*build()), fabric.backward, _roots("fabric", "lightning_utilities"), loader)


def _lightning(precision: str, build: Callable[[], Any], loader: Any) -> Subject:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    loader = fabric.setup_dataloaders(loader) if loader else ()
    return Subject(*fabric.setup(*build()), fabric.backward, _roots("lightning.fabric", "lightning_utilities"), loader)


def _accelerate(precision: str, build: Callable[[], Any], loader: Any) -> Subject:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # one process can't measure two precisions otherwise
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if precision == "bf16-mixed" else "no")
    loader = accelerator.prepare(loader) if loader else ()
    return Subject(*accelerator.prepare(*build()), accelerator.backward, _roots("accelerate"), loader)


def _roots(*packages: str) -> tuple[str, ...]:
    origins = [spec.origin for spec in map(find_spec, packages) if spec and spec.origin]
    return tuple(os.path.dirname(origin) + os.sep for origin in origins)
