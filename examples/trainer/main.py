# SPDX-License-Identifier: Apache-2.0
"""Build your own trainer: epochs, accumulation, validation, checkpoints and callbacks, with every line in sight.

python main.py                                    one process, until early stopping ends it
python main.py --devices 2                        two processes, the same numbers
python main.py --resume                           go on from the last checkpoint, also in the middle of an epoch

A callback is any object: `fabric.call("hook", ...)` calls the method of that name on each that has it. This trainer
calls, on every rank: on_fit_start(trainer), on_step_end(trainer, loss), on_validation_end(trainer, metrics) and
on_fit_end(trainer).
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabric as L
from fabric.loggers import CSVLogger
from fabric.utilities.imports import require_extra

BATCH = 64  # samples of one optimizer step, over all ranks and micro-batches


@dataclass
class Trainer:
    """Fits a model whose `training_step(batch)` returns one loss per sample, and `validation_step` a dict of such."""

    fabric: L.Fabric
    out: Path
    epochs: int
    steps: int | None = None  # end after so many optimizer steps, also in the middle of an epoch
    accumulate: int = 1  # micro-batches of a step
    save_every: int = 50  # steps between two checkpoints within an epoch
    should_stop: bool = False  # for callbacks to set, on one rank or on all

    def fit(self, model: nn.Module, optimizer: Any, scheduler: Any, train: Any, val: Any, *, resume: bool) -> None:
        fabric, checkpoint = self.fabric, self.out / "last.pt"
        model, optimizer = fabric.setup(model, optimizer)
        train, val = fabric.setup_dataloaders(train, val)
        self.model, self.optimizer, self.checkpoint = model, optimizer, checkpoint
        self.state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": train}
        self.state |= {"fabric": fabric, "epoch": 0, "step": 0}  # `fabric` brings random states and callbacks
        if resume and checkpoint.exists():
            fabric.load(checkpoint, self.state)
            fabric.print(f"going on from step {self.state['step']} of {checkpoint}")

        fabric.call("on_fit_start", self)
        while self.state["epoch"] < self.epochs and not self.ended():
            if self.train_epoch(train):
                self.state["epoch"] += 1
                scheduler.step()
                metrics = self.validate(val)
                fabric.log_dict(metrics, step=self.state["step"])
                fabric.call("on_validation_end", self, metrics)
            fabric.save(checkpoint, self.state)
        fabric.call("on_fit_end", self)

    def ended(self, wait: bool = True) -> bool:
        """The same answer on all ranks: one that went on alone would wait for the others forever."""
        return self.state["step"] == self.steps or self.fabric.any_rank(self.should_stop, wait=wait)

    def train_epoch(self, train: Any) -> bool:
        """Train to the end of the epoch, or of the fit; returns whether it was the epoch's."""
        windows = self.fabric.accumulate(train, self.accumulate, count="samples")
        bar = self.fabric.progress(windows, description=f"epoch {self.state['epoch']}", unit="step", samples=BATCH)
        for micro_batches in bar:
            total = torch.zeros((), device=self.fabric.device)
            for batch in micro_batches:
                # Ranks exchange gradients once per step, in the backward of the window's last micro-batch.
                with self.fabric.no_backward_sync(self.model, enabled=not micro_batches.is_last):
                    loss = micro_batches.mean(self.model.training_step(batch))
                    self.fabric.backward(loss)
                total += loss.detach()
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1
            bar.show(loss=total)
            self.fabric.call("on_step_end", self, total)
            if self.state["step"] % self.save_every == 0:
                self.fabric.save(self.checkpoint, self.state)
            if self.ended(wait=False):  # learns one step later of a callback that stops, and costs next to nothing
                return False
        return True

    @torch.no_grad()
    def validate(self, val: Any) -> dict[str, float]:
        """The means over all samples, each counted once."""
        self.model.eval()
        parts = [self.fabric.gather_for_metrics(self.model.validation_step(batch), val) for batch in val]
        self.model.train()
        return {name: float(torch.cat([part[name] for part in parts]).double().mean()) for name in parts[0]}


class EarlyStopping:
    """Ends the fit once the validation loss has not improved for `patience` epochs. Its state is in checkpoints."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.waited = patience, float("inf"), 0

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.waited = 0 if metrics["loss"] < self.best else self.waited + 1
        self.best = min(self.best, metrics["loss"])
        trainer.should_stop = self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class KeepBest:
    """Tells the metrics, and keeps the weights with the best accuracy."""

    def __init__(self) -> None:
        self.best = 0.0

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        trainer.fabric.print(f"epoch {trainer.state['epoch']:2d}  {numbers}", flush=True)
        if metrics["accuracy"] > self.best:
            self.best = metrics["accuracy"]
            trainer.fabric.save(trainer.out / "best.pt", {"model": trainer.model})  # on every rank, as always

    def on_fit_end(self, trainer: Trainer) -> None:
        trainer.fabric.print(f"{trainer.state['step']} steps, best accuracy {self.best:.4f}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class Classifier(nn.Module):
    """The trainer calls the two steps on the set-up model: methods of these names go through DDP as `forward` does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels, reduction="none")

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.net(images)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return {"loss": losses, "accuracy": (logits.argmax(dim=1) == labels).float()}


def main(args: argparse.Namespace) -> None:
    require_extra("examples/trainer", extra="examples", requirement="scikit-learn")
    from sklearn.datasets import load_digits

    L.seed_everything(1)
    fabric = L.Fabric(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision,
        callbacks=[KeepBest(), EarlyStopping(patience=args.patience)],
        loggers=CSVLogger(args.out, name="logs"),
    )
    fabric.launch()

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
    trainer = Trainer(fabric, args.out, args.epochs, args.steps, args.accumulate, args.save_every)
    micro_batch = BATCH // args.accumulate // fabric.world_size
    train = DataLoader(TensorDataset(images[:1200], labels[:1200]), batch_size=micro_batch, shuffle=True)
    val = DataLoader(TensorDataset(images[1200:], labels[1200:]), batch_size=128)
    trainer.fit(model, optimizer, scheduler, train, val, resume=args.resume)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--accelerator", "--devices", "--strategy", "--precision"):
        parser.add_argument(flag)  # what is not said here, `fabric run`, the cluster and the machine decide
    parser.add_argument("--epochs", type=int, default=40, help="at most")
    parser.add_argument("--steps", type=int, help="end after so many steps, also in the middle of an epoch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--patience", type=int, default=3, help="epochs without improvement before early stopping")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints within an epoch")
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    main(parser.parse_args())
