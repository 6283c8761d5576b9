# SPDX-License-Identifier: Apache-2.0
"""A strategy of your own, on a page: local SGD. Each rank trains its own copy; every k steps the copies are averaged.

python main.py --devices 2            DDP sends every gradient; this sends the parameters once in 8 steps
python main.py --devices 2 --every 1  averages at each step, so that the ranks never drift apart
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabric as L
from fabric.strategies import ParallelStrategy


class LocalSGD(ParallelStrategy):
    """Average the parameters over all ranks after every `every`-th step, and send nothing in between."""

    def __init__(self, *, every: int) -> None:
        super().__init__()
        self.every, self.steps, self.averaged = every, 0, 0

    def setup_module(self, module: nn.Module) -> nn.Module:
        module.load_state_dict(self.broadcast(module.state_dict()))  # all ranks start from rank 0's weights
        return module

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: object) -> object:
        result = super().optimizer_step(optimizer, **kwargs)
        self.steps += 1
        if self.steps % self.every == 0:
            self.averaged += 1
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.copy_(self.all_reduce(parameter.data))
        return result


def spirals(count: int) -> TensorDataset:
    """Points on two interleaved spirals, with the number of their spiral."""
    radius, label = torch.rand(count).sqrt(), torch.randint(2, (count,))
    angle = 2 * math.pi * radius + math.pi * label + 0.1 * torch.randn(count)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), label)


def drift(fabric: L.Fabric, model: nn.Module) -> float:
    """How far apart the copies are: the largest difference between two ranks in any parameter."""
    flat: Tensor = nn.utils.parameters_to_vector(model.parameters()).detach()
    return float(fabric.all_reduce(flat, reduce_op="max").sub(fabric.all_reduce(flat, reduce_op="min")).max())


def main(args: argparse.Namespace) -> None:
    L.seed_everything(1)
    strategy = LocalSGD(every=args.every)
    fabric = L.Fabric(accelerator=args.accelerator, devices=args.devices, strategy=strategy)
    fabric.launch()

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(spirals(4096), batch_size=64 // fabric.world_size, shuffle=True))

    step = 0
    while step < args.steps:
        for points, label in loader:
            loss = F.cross_entropy(model(points), label)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.log_every in (0, args.log_every - 1):  # just before an average and just after it
                loss, apart = fabric.all_reduce(loss.detach()), drift(fabric, model)
                fabric.print(
                    f"step {step:4d}  loss {loss:.4f}  ranks apart by {apart:.6f}  averages {strategy.averaged}"
                )
            if step == args.steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator")  # what is not said here, the machine and the cluster decide
    parser.add_argument("--devices")
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--log-every", type=int, default=80)
    main(parser.parse_args())
