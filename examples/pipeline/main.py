# SPDX-License-Identifier: Apache-2.0
"""A small GPT in stages: each process holds some layers only, and micro-batches go from process to process.

python main.py                                      one process, which holds all of it
python main.py --devices 2                          two stages, the same losses
python main.py --devices 2 --schedule interleaved_1f1b     four stages, two on each process
python main.py --devices 4 --copies 2               two pipelines of two stages, which read different data
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabric as L
from fabric.strategies import PipelineParallelStrategy, Strategy

BLOCK, BATCH, WIDTH, HEADS, LAYERS, BYTES = 64, 32, 128, 4, 4, 256  # BATCH is global: each pipeline takes its share


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Nothing in it knows of stages: `split_at` names the layers at which its forward is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        return self.head(self.norm(self.layers(self.token(tokens) + self.position(positions))))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def read_text() -> tuple[TensorDataset, TensorDataset]:
    """Blocks of bytes, training and validation; only whole batches."""
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    blocks = text.unfold(0, BLOCK + 1, BLOCK)
    train_end = len(blocks) * 9 // 10 // BATCH * BATCH
    return TensorDataset(blocks[:train_end]), TensorDataset(blocks[train_end : train_end + 2 * BATCH])


def choose_strategy(args: argparse.Namespace) -> Strategy | str:
    """Two stages for each process with an interleaved schedule, else one."""
    size = args.devices // args.copies
    if size == 1:
        return "auto"
    stages = size if args.schedule in ("gpipe", "1f1b") else 2 * size
    split_at = [f"layers.{stage * LAYERS // stages}" for stage in range(1, stages)]
    return PipelineParallelStrategy(
        split_at=split_at, schedule=args.schedule, num_microbatches=args.micro_batches, data_parallel_size=args.copies
    )


def main(args: argparse.Namespace) -> None:
    L.seed_everything(1)
    strategy = choose_strategy(args)
    fabric = L.Fabric(accelerator=args.accelerator, devices=args.devices, strategy=strategy, precision=args.precision)
    fabric.launch()

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    fabric.print(fabric.explain())
    train_set, val_set = read_text()
    train, val = fabric.setup_dataloaders(
        DataLoader(train_set, batch_size=BATCH // args.copies, shuffle=True),
        DataLoader(val_set, batch_size=BATCH // args.copies),
    )

    step, started = 0, time.perf_counter()
    while step < args.steps:
        for (blocks,) in train:
            loss = fabric.forward_backward(model, blocks[:, :-1], target=blocks[:, 1:], loss_fn=loss_of)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.log_every == 0 or step == args.steps:
                with torch.no_grad():
                    val_loss = torch.stack([loss_of(model(blocks[:, :-1]), blocks[:, 1:]) for (blocks,) in val]).mean()
                loss, val_loss = fabric.all_reduce(loss).item(), fabric.all_reduce(val_loss).item()
                speed = step * BATCH * BLOCK / (time.perf_counter() - started)
                fabric.print(f"step {step:4d}  loss {loss:.4f}  val {val_loss:.4f}  {speed:,.0f} tokens/s", flush=True)
            if step == args.steps:
                break
    fabric.save(args.out / "checkpoint", {"model": model, "optimizer": optimizer, "step": step})
    fabric.print(f"wrote {args.out / 'checkpoint'}, which holds all stages")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--copies", type=int, default=1, help="pipelines that read different data")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--precision")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"))
    main(parser.parse_args())
