# SPDX-License-Identifier: Apache-2.0
"""A causal transformer on long sequences, of which each process has a part. On 2 CPU cores it takes about a minute.

python main.py                                      one process with whole sequences
python main.py --devices 2 --context-parallel 2     each process has half of each sequence; the same losses
python main.py --devices 4 --context-parallel 2     two halves, for each of two parts of the batch
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabric as L
from fabric.strategies import ModelParallelStrategy

LENGTH, BATCH, WIDTH, HEADS, LAYERS, BYTES = 1024, 4, 64, 4, 2, 256  # BATCH is global: each data rank takes its share


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # The one place where tokens meet: inside of `fabric.context_parallel` it sees those of all processes.
        x = x + self.out(attention(rotate(q, turns), rotate(k, turns), v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Positions come with the tokens: a process that counted its own would begin with 0 in the middle."""
        x, turns = self.token(tokens), angles(positions)
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(self.norm(x))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def angles(positions: Tensor) -> Tensor:
    """Rotary embedding: the angle of each pair of features at each position, as complex numbers of length 1."""
    speeds = 10000.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2, device=positions.device)
    return torch.polar(torch.ones((), device=positions.device), positions[:, None] * speeds)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


def read_text() -> TensorDataset:
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    blocks = text.unfold(0, LENGTH + 1, LENGTH)
    return TensorDataset(blocks[: len(blocks) // BATCH * BATCH])


def main(args: argparse.Namespace) -> None:
    L.seed_everything(1)
    strategy = ModelParallelStrategy(context_parallel_size=args.context_parallel)
    fabric = L.Fabric(accelerator=args.accelerator, devices=args.devices, strategy=strategy, precision=args.precision)
    fabric.launch()

    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    # The processes that share a sequence get the same batches.
    loader = fabric.setup_dataloaders(
        DataLoader(read_text(), batch_size=BATCH // strategy.data_parallel_size, shuffle=True)
    )
    positions = torch.arange(LENGTH, device=fabric.device)

    step = 0
    while step < args.steps:
        for (blocks,) in loader:
            step += 1
            batch = (blocks[:, :-1], blocks[:, 1:], positions)
            with fabric.context_parallel(batch, seq_dims=(1, 1, 0)) as (tokens, targets, own_positions):
                logits = model(tokens, own_positions)
                losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
                fabric.backward(losses.mean())  # all have equally many tokens, so that the mean of means is right
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

            if step % args.log_every == 0 or step == args.steps:
                loss = fabric.all_reduce(losses.detach().mean()).item()
                # The losses of all positions, put together from the parts of each process.
                whole = fabric.strategy.gather_sequence(losses.mean(0), 0)
                first, last = fabric.all_reduce(whole.unflatten(0, (8, -1)).mean(1))[[0, -1]].tolist()
                fabric.print(f"step {step:4d}  loss {loss:.4f}  first eighth {first:.4f}  last {last:.4f}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--accelerator", "--devices", "--precision"):
        parser.add_argument(flag)  # what is not said here, `fabric run`, the cluster and the machine decide
    parser.add_argument("--context-parallel", type=int, default=1, metavar="N", help="processes that share a sequence")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log-every", type=int, default=10)
    main(parser.parse_args())
