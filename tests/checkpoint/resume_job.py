# SPDX-License-Identifier: Apache-2.0
"""A training script as users write them, which `test_resume.py` kills and starts again.

Each rank appends a line to its log for every step: the loss in hexadecimal, what it drew, which samples it saw.
"""

import argparse
import hashlib
import json
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric
from fabric.checkpoint import CheckpointManager, whole
from fabric.plugins.precision import MixedPrecision
from fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, PipelineParallelStrategy

SAMPLES, GLOBAL_BATCH, ACCUMULATE, LENGTH, WIDTH = 44, 4, 2, 4, 8  # epochs end with a short window
OPTIONS: dict[str, Any] = {
    "strategy": "single",
    "precision": None,
    "steps": 14,
    "every": 3,  # steps between two saves
    "keep": "manager",  # all checkpoints; or `file`, `background`: one, that is replaced
    "exact": True,  # with dropout, augmentation and numbers drawn in the loop; False leaves them out
    "resume": None,  # the path of a checkpoint; by default the latest of this run, if there is one
    "wait_at": None,  # a step, after whose save the script waits to be killed
}


class Samples(Dataset[Any]):
    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x = torch.sin(torch.arange(LENGTH * WIDTH) * (index + 1.0)).view(LENGTH, WIDTH)
        noise = torch.rand(LENGTH, WIDTH) + random.random() + float(np.random.rand()) if self.augment else 0.0
        return index, x + 0.1 * noise, x.flip(1)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # that of k has no gradient but rounding errors
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.dropout(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        scale = 1 + 0.1 * random.random() if self.dropout.p else 1.0
        return x + scale * self.dropout(self.down(self.up(x).relu()))


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def split(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def choose_strategy(name: str) -> Any:
    made: dict[str, Any] = {
        "single": lambda: "auto",
        "ddp": DDPStrategy,
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={Block}),
        "hsdp": lambda: ModelParallelStrategy(data_parallel_size=2, replicate_size=2, auto_wrap_policy={Block}),
        "tp": lambda: ModelParallelStrategy(split, tensor_parallel_size=2),
        "cp": lambda: ModelParallelStrategy(context_parallel_size=2),
        "pipeline": lambda: PipelineParallelStrategy(split_at=["blocks.1"], num_microbatches=2),
    }
    return made[name]()


def choose_precision(options: Mapping[str, Any]) -> dict[str, Any]:
    """A loss scaler that changes its scale every third step has a state worth keeping; a pipeline has its own."""
    precision = options.get("precision")
    if precision != "16-mixed" or options["strategy"] == "pipeline":
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}


class Run:
    """All that a run consists of.

    Args:
        fabric: Launched.
        out: The folder of the run.
        options: As `OPTIONS`.
    """

    def __init__(self, fabric: Any, out: Path, options: Mapping[str, Any]) -> None:
        data_ranks, data_rank = (fabric.strategy.distributed_sampler_kwargs[key] for key in ("num_replicas", "rank"))
        exact = options["exact"]
        fabric.seed_everything(7 + data_rank if exact else 7, workers=True, verbose=False)
        self.fabric, self.options, self.path = fabric, options, out / "checkpoint"
        self.net = Net(0.2 if exact else 0.0)
        self.model, self.optimizer = fabric.setup(self.net, torch.optim.AdamW(self.net.parameters(), lr=0.02))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, OPTIONS["steps"])
        loader = DataLoader(Samples(exact), GLOBAL_BATCH // data_ranks, shuffle=True, num_workers=2 if exact else 0)
        self.loader = fabric.setup_dataloaders(loader)
        self.manager = CheckpointManager(out, fabric=fabric, every=options["every"], signals=())
        self.state = {"fabric": fabric, "model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self.state |= {"scheduler": self.scheduler, "step": 0}

    def restore(self) -> None:
        if self.options["resume"]:
            self.fabric.load(self.options["resume"], self.state)
        elif self.options["keep"] == "manager":
            self.manager.restore(self.state)
        elif self.fabric.broadcast(self.path.exists()):
            self.fabric.load(self.path, self.state)

    def save(self) -> None:
        if self.options["keep"] == "manager":
            self.manager.save(self.state["step"], self.state)
        elif self.state["step"] % self.options["every"] == 0:
            self.fabric.save(self.path, self.state, blocking=self.options["keep"] == "file")

    def step(self, window: Any) -> dict[str, Any]:
        """One optimizer step; what is logged of it."""
        drawn = random.random() + float(np.random.randn()) if self.options["exact"] else 0.0
        losses, seen = [], []
        for indices, x, y in window:
            seen.append(indices.tolist())
            x = x + 0.01 * drawn
            if self.options["strategy"] == "cp":
                with self.fabric.context_parallel((x, y), seq_dims=(1, 1)) as (x, y):
                    losses.append(self.forward_backward(window, x, y))
            else:
                losses.append(self.forward_backward(window, x, y))
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.state["step"] += 1
        numbers = {"loss": float(sum(losses)).hex(), "norm": norm.item().hex()}
        return {"step": self.state["step"], "drawn": drawn, "seen": seen, **numbers}

    def forward_backward(self, window: Any, x: Tensor, y: Tensor) -> Tensor:
        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return window.mean(nn.functional.mse_loss(output, target))

        with self.fabric.no_backward_sync(self.model, enabled=not window.is_last):
            return self.fabric.forward_backward(self.model, x, target=y, loss_fn=loss_fn)

    def train(self, log: TextIO) -> None:
        while self.state["step"] < self.options["steps"]:
            for window in self.fabric.accumulate(self.loader, ACCUMULATE):
                print(json.dumps(self.step(window)), file=log, flush=True)
                self.fabric.print(f"saving {self.state['step']}", flush=True)
                self.save()
                if self.state["step"] == self.options["wait_at"]:
                    signal.pause()
                if self.state["step"] == self.options["steps"]:
                    break


def train(fabric: Fabric, out: Path, **given: Any) -> dict[str, Any]:
    """Train to the last step, from a checkpoint if there is one.

    Returns:
        All that this rank has in the end, under `own`, and the whole model under `model`.
    """
    run = Run(fabric, out, OPTIONS | given)
    with run.manager, (out / f"rank-{fabric.global_rank}.log").open("a") as log:
        run.restore()
        print(json.dumps({"from": run.state["step"], "pid": os.getpid()}), file=log, flush=True)
        run.train(log)
    return {"own": digest(run), "model": {name: whole(value).tolist() for name, value in run.net.state_dict().items()}}


def digest(run: Run) -> dict[str, Any]:
    """This rank's part of everything, its next random numbers and where it stands."""
    parts = [local(value) for value in run.net.state_dict().values()]
    for parameter in run.net.parameters():
        parts += [local(value) for _, value in sorted(run.optimizer.state.get(parameter, {}).items())]
    return {
        "sums": [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in parts],
        "numbers": [torch.rand(1).item(), random.random(), float(np.random.randn())],
        "rates": run.scheduler.get_last_lr(),
        "scaler": run.fabric.state_dict()["precision"],
        "loader": list(run.loader.place),
    }


def local(value: Tensor) -> Tensor:
    value = value.detach()
    return value.to_local() if hasattr(value, "to_local") else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision")
    for name in ("strategy", "keep"):
        parser.add_argument(f"--{name}", default=OPTIONS[name])
    parser.add_argument("--wait-at", type=int)
    args = vars(parser.parse_args())
    out, devices = args.pop("out"), args.pop("devices")
    fabric = Fabric(
        accelerator="cpu",
        devices=devices,
        strategy=choose_strategy(args["strategy"]),
        **choose_precision(args),
    )
    fabric.launch()
    result = train(fabric, out, **args)
    (out / f"end-{fabric.global_rank}.json").write_text(json.dumps(result["own"]))
