# SPDX-License-Identifier: Apache-2.0
"""A small GPT learns the English of Python's own manual, byte by byte. On 2 CPU cores it takes about a minute.

python main.py                                    one process
python main.py --devices 2                        two processes, the same loss curve
torchrun --nproc-per-node 2 main.py               the same, started by torchrun
fabric run --devices 2 --precision bf16-mixed main.py
python main.py --resume                           go on from the last checkpoint
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
from fabric.loggers import CSVLogger

BLOCK, BATCH, WIDTH, HEADS, LAYERS, BYTES = 64, 32, 128, 4, 4, 256  # BATCH is global: each rank takes its share of it


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
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        return self.head(self.norm(self.layers(self.token(tokens) + self.position(positions))))


def loss_of(model: nn.Module, blocks: Tensor) -> Tensor:
    return F.cross_entropy(model(blocks[:, :-1]).flatten(0, 1), blocks[:, 1:].flatten())


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, count: int) -> str:
    for _ in range(count):
        logits = model(tokens[:, -BLOCK:])[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def read_text() -> tuple[TensorDataset, TensorDataset]:
    """Blocks of bytes, training and validation. Only whole batches, so that all ranks have the same number of them."""
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    blocks = text.unfold(0, BLOCK + 1, BLOCK)
    train_end, val_end = len(blocks) * 9 // 10 // BATCH * BATCH, len(blocks) // BATCH * BATCH
    return TensorDataset(blocks[:train_end]), TensorDataset(blocks[train_end:val_end][: 10 * BATCH])


def draw(curve: list[list[float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.plot([step for step, _, _ in curve], [[loss, val_loss] for _, loss, val_loss in curve])
    plt.legend(["training", "validation"])
    plt.xlabel("step")
    plt.ylabel("loss (nats per byte)")
    plt.savefig(path)


def main(args: argparse.Namespace) -> None:
    L.seed_everything(1)
    fabric = L.Fabric(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy=args.strategy,
        precision=args.precision,
        loggers=CSVLogger(args.out, name="logs"),
    )
    fabric.launch()
    fabric.print(fabric.explain())

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    train_set, val_set = read_text()
    train, val = fabric.setup_dataloaders(
        DataLoader(train_set, batch_size=BATCH // fabric.world_size, shuffle=True),
        DataLoader(val_set, batch_size=BATCH // fabric.world_size),
    )

    checkpoint = args.out / "checkpoint.pt"
    state = {"model": model, "optimizer": optimizer, "loader": train, "fabric": fabric, "step": 0, "curve": []}
    if args.resume and checkpoint.exists():
        fabric.load(checkpoint, state)
        fabric.print(f"going on from step {state['step']} of {checkpoint}")

    tokens, started = 0, time.perf_counter()
    while state["step"] < args.steps:
        for (blocks,) in train:
            loss = loss_of(model, blocks)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            tokens += BATCH * BLOCK
            step, last = state["step"], state["step"] == args.steps

            if step % args.log_every == 0 or last:
                speed = tokens / (time.perf_counter() - started)
                with torch.no_grad():
                    val_loss = torch.stack([loss_of(model, blocks) for (blocks,) in val]).mean()
                loss, val_loss = fabric.all_reduce(loss.detach()).item(), fabric.all_reduce(val_loss).item()
                state["curve"].append([step, loss, val_loss])
                fabric.log_dict({"loss": loss, "val_loss": val_loss, "tokens_per_second": speed}, step=step)
                fabric.print(f"step {step:4d}  loss {loss:.4f}  val {val_loss:.4f}  {speed:,.0f} tokens/s", flush=True)
                tokens, started = 0, time.perf_counter()
            if step % args.save_every == 0 or last:
                fabric.save(checkpoint, state)
            if last:
                break

    prompt = torch.tensor([list(b"The ")], device=fabric.device)
    fabric.print(f"\n{generate(model, prompt, 300)}\n")
    if fabric.is_global_zero:
        draw(state["curve"], args.out / "loss.png")
        print(f"wrote {checkpoint}, {args.out / 'loss.png'} and {fabric.logger.log_dir}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--accelerator", "--devices", "--num-nodes", "--strategy", "--precision"):
        parser.add_argument(flag)  # what is not said here, `fabric run`, the cluster and the machine decide
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    main(parser.parse_args())
