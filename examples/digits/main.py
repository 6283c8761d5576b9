# SPDX-License-Identifier: Apache-2.0
"""Scikit-learn's digits, with an accuracy that is the same for every number of processes, to the last digit.

python main.py                                    one process
python main.py --devices 2                        two processes, the same lines
python main.py --devices 4 --eval-batch 7         four, and an evaluation whose ends do not go round: the same lines
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fabric as L
from fabric.utilities.imports import require_extra

BATCH = 64  # of training, global: each rank takes its share of it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2))
        self.head = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(16 * 3 * 3, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


def read_digits() -> TensorDataset:
    """1,797 images of shape (1, 8, 8) with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))


@torch.no_grad()
def accuracy_of(fabric: L.Fabric, model: nn.Module, loader: DataLoader) -> float:
    """The share of samples whose label the model guesses.

    All ranks get the same number of batches, so the last ones may hold samples that another rank has too. The loader
    knows which: `gather_for_metrics` leaves them out, and every sample counts once.
    """
    model.eval()
    correct = total = 0
    for images, labels in loader:
        guesses, labels = fabric.gather_for_metrics((model(images).argmax(dim=1), labels), loader)
        correct += int((guesses == labels).sum())
        total += len(labels)
    model.train()
    return correct / total


def main(args: argparse.Namespace) -> None:
    require_extra("examples/digits", extra="examples", requirement="scikit-learn")
    L.seed_everything(1)
    fabric = L.Fabric(
        accelerator=args.accelerator, devices=args.devices, strategy=args.strategy, precision=args.precision
    )
    fabric.launch()

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    digits = read_digits()
    train_set, test_set = TensorDataset(*digits[:1200]), TensorDataset(*digits[1200:])
    train, test, everything = fabric.setup_dataloaders(
        DataLoader(train_set, batch_size=BATCH // fabric.world_size, shuffle=True, drop_last=True),
        DataLoader(test_set, batch_size=args.eval_batch),
        DataLoader(digits, batch_size=args.eval_batch),
    )

    for epoch in range(args.epochs):
        for images, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
        accuracy = accuracy_of(fabric, model, test)
        fabric.print(f"epoch {epoch}  accuracy {accuracy}", flush=True)  # all its digits

    fabric.print(f"accuracy over all {len(digits)} digits {accuracy_of(fabric, model, everything)}")
    fabric.save(args.out / "model.pt", {"model": model})
    fabric.print(f"wrote {args.out / 'model.pt'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--accelerator", "--devices", "--strategy", "--precision"):
        parser.add_argument(flag)  # what is not said here, `fabric run`, the cluster and the machine decide
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--eval-batch", type=int, default=64, help="samples per rank and batch in the evaluation")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    main(parser.parse_args())
