# SPDX-License-Identifier: Apache-2.0
"""Code with `assert` in it, apart from the tests, in which pytest rewrites each of them."""

import torch
import torch.nn.functional as F
from torch import nn


def plain_assert(value):
    assert value


def compared(value):
    assert value <= 3


def with_a_message(value):
    assert value <= 3, f"{value} is too much"


class Net(nn.Module):
    """Uses an early result late, shapes everywhere, a parameter twice, a module twice, and its mode."""

    def __init__(self):
        super().__init__()
        self.first, self.bias = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x, mask=None):
        rows, width = x.shape
        assert rows < 9, "too many"
        if width != 4:
            raise ValueError(f"{width} is not 4")
        early = self.first(x) + self.bias
        hidden = early
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.first(hidden) + early.mean(1, keepdim=True) + torch.arange(width) * self.bias
        hidden = F.dropout(hidden, 0.5, self.training) / hidden.size(0)
        if self.training:
            hidden = hidden + 1
        return {"output": self.head(hidden), "rows": rows}
