# SPDX-License-Identifier: Apache-2.0
"""A GPT on a mesh of two dimensions: the ranks of a tensor group split each layer, and the groups split the batch.

python main.py                                    one process
python main.py --devices 2                        two ranks that split each layer and each sequence
python main.py --devices 4 --tensor-parallel 2    two such groups; each reads half of the batch, and FSDP joins them

The losses are the same. On GPUs a tensor group belongs on one machine, because its ranks talk in each layer.
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import fabric as L
from fabric.strategies import ModelParallelStrategy

LENGTH, BATCH, WIDTH, HEADS, LAYERS, BYTES = 64, 16, 128, 4, 2, 256  # BATCH is global: each group takes its share


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # A rank has the heads that its columns of q, k and v make: -1, and not HEADS.
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(LENGTH, device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Say how each layer is split. Between attention and feed-forward each rank has a part of the sequence."""
    plan = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),  # a rank has a part of the bytes
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),  # logits stay split, for the loss
    }
    for number in range(LAYERS):
        layer = {
            "norm1": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},  # a rank has a part of the heads
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        plan |= {f"layers.{number}.{name}": style for name, style in layer.items()}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def main(args: argparse.Namespace) -> None:
    L.seed_everything(1)
    strategy = ModelParallelStrategy(split, tensor_parallel_size=args.tensor_parallel)
    fabric = L.Fabric(accelerator=args.accelerator, devices=args.devices, strategy=strategy, precision=args.precision)
    fabric.launch()

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = fabric.setup(model, optimizer)
    fabric.print(fabric.explain())
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    blocks = TensorDataset(text.unfold(0, LENGTH + 1, LENGTH))
    # Ranks of one tensor group read the same batches; the loader knows that.
    loader = fabric.setup_dataloaders(DataLoader(blocks, BATCH // strategy.data_parallel_size, shuffle=True))

    for step, (block,) in enumerate(loader, start=1):
        with loss_parallel():  # around the loss and its backward: no rank ever has the logits of all bytes
            loss = F.cross_entropy(model(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())
            fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_every == 0:
            loss = fabric.all_reduce(loss.detach())
            fabric.print(f"step {step:4d}  loss {loss:.4f}  gradient {norm:.4f}", flush=True)
        if step == args.steps:
            break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--accelerator", "--devices", "--precision"):
        parser.add_argument(flag)  # what is not said here, `fabric run`, the cluster and the machine decide
    parser.add_argument("--tensor-parallel", default="auto", type=lambda size: size if size == "auto" else int(size))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--log-every", type=int, default=10)
    main(parser.parse_args())
