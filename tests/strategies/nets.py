# SPDX-License-Identifier: Apache-2.0
"""A small transformer-like model with several ways to split it, for the tests of strategies that split layers."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS, LENGTH, WIDTH = 12, 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, words, scale):
        return scale * loss_of(self(words), words)


def net(tied=False, seed=1):
    torch.manual_seed(seed)
    return Net(tied)


def loss_of(output, words):
    return F.cross_entropy(output.flatten(0, 1), words.flip(1).flatten())


def batch(step, micro=0, size=4):
    """The joined batch of all ranks."""
    return torch.randint(WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(100 * step + micro))


def _blocks(styles):
    return {f"blocks.{number}.{name}": style for number in range(2) for name, style in styles.items()}


def split_layers(module, mesh):
    """Only what is large: norms, embedding and head stay whole."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(
        module, mesh["tensor_parallel"], _blocks({"up": ColwiseParallel(), "down": RowwiseParallel()})
    )


def split_sequence(module, mesh, *, vocabulary=False):
    """All parameters; between the split layers each rank has a part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    layers = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    output = {"use_local_output": False} if vocabulary else {"output_layouts": Replicate()}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **_blocks(layers),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), **output),
    }
    return parallelize_module(module, mesh["tensor_parallel"], plan)


def split_vocabulary(module, mesh):
    """Logits stay split too, for `loss_parallel`."""
    return split_sequence(module, mesh, vocabulary=True)


def split_and_shard(module, mesh):
    """As programs do that were written for other runtimes."""
    from torch.distributed.fsdp import fully_shard

    split_layers(module, mesh)
    for block in module.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(module, mesh=mesh["data_parallel"])


def split_and_shard_blocks(module, mesh):
    """The same, where the program leaves the rest of the model to others."""
    from torch.distributed.fsdp import fully_shard

    split_layers(module, mesh)
    for block in module.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return module


def whole(tensor):
    """All of a `DTensor`, gathered over one dimension of its mesh after the other; a plain tensor itself."""
    from torch.distributed.tensor import DTensor, Replicate

    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    for dim in range(tensor.device_mesh.ndim):
        tensor = tensor.redistribute(placements=[Replicate()] * (dim + 1) + list(tensor.placements[dim + 1 :]))
    return tensor.to_local().clone()
