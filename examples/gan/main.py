# SPDX-License-Identifier: Apache-2.0
"""A GAN: two models and two optimizers, side by side. It learns to write scikit-learn's digits of 8 x 8 pixels.

python main.py                                    one process, about 20 seconds
python main.py --devices 2                        two processes
python main.py --epochs 1 --out /tmp/gan          a first look
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabric as L
from fabric.utilities.imports import require_extra

NOISE, WIDTH, PIXELS, BATCH = 16, 128, 64, 64  # BATCH is global: each rank takes its share of it


def make_generator() -> nn.Module:
    """Noise of shape (batch, NOISE) to pixels in [-1, 1] of shape (batch, PIXELS)."""
    return nn.Sequential(
        *(nn.Linear(NOISE, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, PIXELS), nn.Tanh()),
    )


def make_discriminator() -> nn.Module:
    """Pixels to one logit each: above 0 it takes them for real."""
    return nn.Sequential(
        *(nn.Linear(PIXELS, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        nn.Linear(WIDTH, 1),
    )


def read_digits() -> TensorDataset:
    from sklearn.datasets import load_digits

    return TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1)


def loss_of(logits: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def distance(samples: Tensor, digits: Tensor) -> float:
    """How far each sample is from the digit most like it plus how far each digit is from its sample: 0 is a copy."""
    apart = torch.cdist(samples.float(), digits)
    return float(apart.min(0).values.mean() + apart.min(1).values.mean())


def draw(samples: Tensor, path: Path) -> None:
    import matplotlib.pyplot as plt

    tiles = F.pad(
        samples[:64].float().cpu().view(8, 8, 8, 8), (2, 2, 2, 2), value=-1
    )  # 8 x 8 digits, and their margins
    grid = tiles.transpose(1, 2).reshape(8 * 12, 8 * 12)
    plt.imsave(path, grid.repeat_interleave(4, 0).repeat_interleave(4, 1), cmap="gray_r")


def main(args: argparse.Namespace) -> None:
    for package in ("scikit-learn", "matplotlib"):
        require_extra("examples/gan", extra="examples", requirement=package)
    L.seed_everything(1)
    fabric = L.Fabric(
        accelerator=args.accelerator, devices=args.devices, strategy=args.strategy, precision=args.precision
    )
    fabric.launch()

    generator, discriminator = make_generator(), make_discriminator()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    generator, g_optimizer = fabric.setup(generator, g_optimizer)
    discriminator, d_optimizer = fabric.setup(discriminator, d_optimizer)
    digits = read_digits()
    loader = fabric.setup_dataloaders(
        DataLoader(digits, batch_size=BATCH // fabric.world_size, shuffle=True, drop_last=True)
    )
    all_digits = fabric.to_device(digits.tensors[0])
    # The models began alike on all ranks. From here on each rank draws its own noise.
    L.seed_everything(1 + fabric.global_rank, verbose=False)
    picture_noise = torch.randn(512 // fabric.world_size, NOISE, device=fabric.device)

    for epoch in range(args.epochs):
        for step, (real,) in enumerate(loader):
            fake = generator(torch.randn(len(real), NOISE, device=fabric.device))

            # The discriminator's turn: tell the two apart. `detach` keeps the generator out of it.
            real_logits, fake_logits = discriminator(torch.cat([real, fake.detach()])).chunk(2)
            d_loss = loss_of(real_logits, real=True) + loss_of(fake_logits, real=False)
            d_optimizer.zero_grad()
            fabric.backward(d_loss, model=discriminator)
            d_optimizer.step()

            # The generator's turn: pass for real. The discriminator's gradients are a by-product, not worth sending.
            with fabric.no_backward_sync(discriminator):
                g_loss = loss_of(discriminator(fake), real=True)
                g_optimizer.zero_grad()
                fabric.backward(g_loss, model=generator)
            g_optimizer.step()

            if args.steps is not None and step + 1 == args.steps:
                break
        if (epoch + 1) % args.log_every == 0 or epoch + 1 == args.epochs:
            with torch.no_grad():
                samples = fabric.all_gather(generator(picture_noise)).view(-1, PIXELS)
            d_mean, g_mean = fabric.all_reduce((d_loss.detach(), g_loss.detach()))
            fabric.print(
                f"epoch {epoch + 1:3d}  discriminator {d_mean:.3f}  generator {g_mean:.3f}"
                f"  distance from the digits {distance(samples, all_digits):.3f}",
                flush=True,
            )

    if fabric.is_global_zero:
        args.out.mkdir(parents=True, exist_ok=True)
        draw(samples, args.out / "samples.png")
        print(f"wrote {args.out / 'samples.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--accelerator", "--devices", "--strategy", "--precision"):
        parser.add_argument(flag)  # what is not said here, `fabric run`, the cluster and the machine decide
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--steps", type=int, help="at most so many steps an epoch")
    parser.add_argument("--log-every", type=int, default=10, help="epochs between two lines")
    parser.add_argument("--out", type=Path, default=Path("runs/gan"))
    main(parser.parse_args())
