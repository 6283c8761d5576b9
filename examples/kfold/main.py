# SPDX-License-Identifier: Apache-2.0
"""K-fold cross validation: one Fabric, k models set up one after another, on scikit-learn's digits.

python main.py                                    one process
python main.py --devices 2                        two processes train each model together, with the same result
python main.py --folds 10 --epochs 20
"""

import argparse
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import fabric as L
from fabric.utilities.imports import require_extra

BATCH = 64  # global: each rank takes its share of it


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(fabric: L.Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(images), labels), model=model)
        optimizer.step()


@torch.no_grad()
def accuracy_of(fabric: L.Fabric, model: nn.Module, loader: DataLoader) -> float:
    """Over every sample once, whatever number of ranks it was dealt to."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        hits = fabric.gather_for_metrics(model(images).argmax(dim=1) == labels, loader)
        correct, total = correct + int(hits.sum()), total + len(hits)
    return correct / total


def main(args: argparse.Namespace) -> None:
    require_extra("examples/kfold", extra="examples", requirement="scikit-learn")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    fabric = L.Fabric(
        accelerator=args.accelerator, devices=args.devices, strategy=args.strategy, precision=args.precision
    )
    fabric.launch()

    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    # The seed makes the folds alike on all ranks: all must agree on what is held out.
    folds = StratifiedKFold(n_splits=args.folds, shuffle=True, random_state=args.seed)

    accuracies = []
    for fold, (train_indices, held_out) in enumerate(folds.split(pixels, labels)):
        L.seed_everything(args.seed, verbose=False)  # each model begins alike: only the fold differs
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        model, optimizer = fabric.setup(model, optimizer)
        train_loader, held_out_loader = fabric.setup_dataloaders(
            DataLoader(
                Subset(digits, train_indices), batch_size=BATCH // fabric.world_size, shuffle=True, drop_last=True
            ),
            DataLoader(Subset(digits, held_out), batch_size=128),
        )
        for _ in range(args.epochs):
            train(fabric, model, optimizer, train_loader)
        accuracies.append(accuracy_of(fabric, model, held_out_loader))
        fabric.print(f"fold {fold}  {len(held_out)} held out  accuracy {accuracies[-1]:.4f}", flush=True)

    fabric.print(f"mean accuracy {mean(accuracies):.4f}, standard deviation {stdev(accuracies):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--accelerator", "--devices", "--strategy", "--precision"):
        parser.add_argument(flag)  # what is not said here, `fabric run`, the cluster and the machine decide
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
