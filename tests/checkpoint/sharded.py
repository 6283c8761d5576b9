# SPDX-License-Identifier: Apache-2.0
"""A model, how it is trained, and hand-written ways to shard it: what the tests of sharded checkpoints share."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

from fabric.checkpoint import whole
from fabric.strategies import FSDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from tests.ranks import RankContext

WORLD = {
    "single": 1,
    "ddp": 2,
    "fsdp1": 1,
    "fsdp2": 2,
    "fsdp4": 4,
    "hsdp": 4,
    "tp": 2,
    "tp_fsdp": 4,
    "ours2": 2,
    "ours4": 4,
}


class Net(nn.Module):
    """Tied weights, uneven sizes, a frozen layer, a buffer, and a layer that never gets a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(11, 6)
            self.up = nn.Linear(6, 8)
            self.frozen = nn.Linear(8, 8)
            self.down = nn.Linear(8, 6, bias=False)
            self.unused = nn.Linear(3, 3)
            self.head = nn.Linear(6, 11, bias=False)
            self.register_buffer("scale", torch.rand(()) + 0.5)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.up(self.embedding(tokens)).relu() * self.scale
        return self.head(self.down(self.frozen(x)))


def optimizer_for(net: nn.Module, kind: str, order: str = "two groups") -> torch.optim.Optimizer:
    """Adam, SGD with or without state, over two groups with options of their own."""
    named = list(net.named_parameters())
    decay = [p for name, p in named if "weight" in name]
    rest = [p for name, p in named if "weight" not in name]
    groups: list[dict[str, Any]] = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.05}]
    if order == "reversed":
        groups = [{"params": rest[::-1], "lr": 0.5}, {"params": decay[::-1], "weight_decay": 0.5}]
    if kind == "adam":
        return torch.optim.Adam(groups, lr=0.02)
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9 if kind == "momentum" else 0.0)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step on data that depends on the number of the step; the same on all ranks, so that no average is needed."""
    tokens = torch.randint(0, 11, (12,), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(tokens), tokens).backward()
    optimizer.step()


def plain(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same by plain PyTorch in one process."""
    net = Net(seed=1)
    optimizer = optimizer_for(net, kind)
    for step in range(steps):
        train(net, optimizer, step)
    return net, optimizer


class ByHand(ParallelStrategy):
    """Shards with PyTorch's own calls.

    Args:
        layout: One of `WORLD`.
        state_dict_type: `full` or `sharded`.
    """

    def __init__(self, layout: str, state_dict_type: Any = "full") -> None:
        super().__init__()
        self.layout = layout
        self.state_dict_type = state_dict_type

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        with self.parameters.follow(module):
            shard(module, self.layout)
        return module


def shard(net: nn.Module, layout: str) -> None:
    from torch.distributed.fsdp import fully_shard

    world = WORLD[layout]
    if layout == "ddp":
        return
    if layout.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data_parallel",))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = tensor_parallel(net, world)
        if mesh is None:
            return
    for block in (net.down,) if layout == "tp_fsdp" else (net.up, net.down):
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(net, mesh=mesh)


def tensor_parallel(net: nn.Module, world: int) -> Any:
    """Returns the mesh for FSDP, if there is one."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    plan = {"up": ColwiseParallel(), "frozen": RowwiseParallel()}
    parallelize_module(net, mesh["tensor_parallel"], plan)
    return mesh["data_parallel"] if world == 4 else None


def make(context: RankContext, layout: str, kind: str, *, seed: int, **options: Any) -> tuple[Any, Any, Any]:
    """A launched Fabric with the net and an optimizer that was made before it was sharded."""
    fabric = context.fabric(strategy=strategy_for(layout, options.pop("type", "full")))
    net = Net(seed)
    net_, optimizer = fabric.setup(net, optimizer_for(net, kind, **options))
    return fabric, net_, optimizer


def strategy_for(layout: str, state_dict_type: Any) -> Strategy:
    """By hand, or Fabric's own."""
    if layout == "single":
        return SingleDeviceStrategy()
    if layout.startswith("ours"):
        return FSDPStrategy(auto_wrap_policy={nn.Linear}, state_dict_type=state_dict_type)
    return ByHand(layout, state_dict_type)


def full_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors of both, whole, under names that do not depend on the optimizer's order. Collective."""
    state = OrderedDict((name, whole(value).clone()) for name, value in net.state_dict().items())
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            options = {key: value for key, value in group.items() if key != "params"}
            state[f"options of {name}"] = options
            for entry, value in optimizer.state.get(parameter, {}).items():
                state[f"{entry} of {name}"] = whole(value).detach().clone()
    return state


def same(a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float = 0.0) -> bool:
    if a.keys() != b.keys():
        return False
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            if value.shape != b[key].shape or not torch.allclose(value, b[key], rtol=0, atol=tolerance):
                return False
        elif value != b[key]:
            return False
    return True


def error_of_load(fabric: Any, path: str, net: Any) -> tuple[str, bool]:
    """What loading says on this rank once all have damaged what they wanted to, and whether `net` is as it was."""
    fabric.barrier()
    nn.init.zeros_(net.module.up.weight)
    try:
        fabric.load(path, {"net": net})
    except ValueError as error:
        return str(error), not net.module.up.weight.to_local().any()
    return "", False
