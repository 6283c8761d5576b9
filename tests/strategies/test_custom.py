# SPDX-License-Identifier: Apache-2.0
"""The strategies of the page `docs/custom-strategies.md`, as they stand there, on real ranks."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
PAGE = Path(__file__).resolve().parents[2] / "docs" / "custom-strategies.md"
STEPS = 4


def strategy_of_the_page(name):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(block, names)
    return names[name]()


def build():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
    return model, torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


def batch(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(model, x):
    return (model(x) - x[:, :2].sin()).square().mean()


def steps(fabric, model, optimizer, numbers):
    for step in numbers:
        fabric.backward(loss_of(model, batch(step)[fabric.global_rank :: fabric.world_size]))
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def zero(context):
    """Trains, saves in the middle, and goes on from there with a second pair of model and optimizer."""
    fabric = context.fabric(strategy=strategy_of_the_page("ZeRO1"))
    model, optimizer = fabric.setup(*build())
    steps(fabric, model, optimizer, range(2))
    kept = len(optimizer.optimizer.optim.state)
    fabric.save("checkpoint.pt", {"model": model, "optimizer": optimizer})
    steps(fabric, model, optimizer, range(2, STEPS))
    again, optimizer = fabric.setup(*build())
    fabric.load("checkpoint.pt", {"model": again, "optimizer": optimizer})
    steps(fabric, again, optimizer, range(2, STEPS))
    fabric.barrier()
    return kept, values(model), values(again), torch.load("checkpoint.pt")


def test_zero_one_trains_as_plain_pytorch_and_its_checkpoint_is_an_ordinary_one():
    model, optimizer = build()
    found = run_ranks(2, zero)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [kept for kept, *_ in found]
    assert sum(kept) == 4  # parameters
    assert max(kept) < 4
    for _, trained, resumed, checkpoint in found:
        for name, value in model.state_dict().items():
            assert torch.allclose(trained[name], value, rtol=1e-12, atol=1e-14)
            assert torch.equal(resumed[name], trained[name])
        plain, plain_optimizer = build()
        plain.load_state_dict(checkpoint["model"])
        plain_optimizer.load_state_dict(checkpoint["optimizer"])
        for step in range(2, STEPS):
            loss_of(plain, batch(step)).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        for name, value in plain.state_dict().items():
            assert torch.allclose(trained[name], value, rtol=1e-12, atol=1e-14)


def delayed(context):
    fabric = context.fabric(strategy=strategy_of_the_page("DelayedGradients"))
    model, optimizer = fabric.setup(*build())
    steps(fabric, model, optimizer, range(STEPS))
    fabric.teardown()
    return values(model)


def test_gradients_that_arrive_a_step_later():
    model, optimizer = build()
    before = None
    for step in range(STEPS):
        gradients = torch.autograd.grad(loss_of(model, batch(step)), list(model.parameters()))
        if before is not None:
            for parameter, gradient in zip(model.parameters(), before, strict=True):
                parameter.grad = gradient
            optimizer.step()
        before = gradients
    for found in run_ranks(2, delayed):
        for name, value in model.state_dict().items():
            assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-14)
