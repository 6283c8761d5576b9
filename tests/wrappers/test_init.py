# SPDX-License-Identifier: Apache-2.0
from collections import namedtuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric, is_wrapped
from fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer, _unwrap_objects


def test_is_wrapped():
    net = nn.Linear(1, 1)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader([1, 2])
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net, plain)
    wrapped = fabric.setup_dataloaders(loader)
    assert not any(map(is_wrapped, (net, plain, loader, None, fabric)))
    assert all(map(is_wrapped, (model, optimizer, wrapped)))
    assert (type(model), type(optimizer)) == (_FabricModule, _FabricOptimizer)
    assert isinstance(wrapped, _FabricDataLoader)


def test_unwrap_objects_reaches_into_containers():
    net = nn.Linear(1, 1)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = Fabric(accelerator="cpu", devices=1).setup(net, plain)
    state = {"model": model, "nested": {"list": [optimizer, 3], "tuple": (model, "text")}}
    assert _unwrap_objects(state) == {"model": net, "nested": {"list": [plain, 3], "tuple": (net, "text")}}
    assert state["model"] is model


def test_unwrap_objects_leaves_what_it_does_not_know():
    Point = namedtuple("Point", "x y")
    point = Point(1, 2)
    assert _unwrap_objects({"point": point})["point"] is point
    assert _unwrap_objects(torch.compile(nn.Linear(1, 1), backend="eager")).weight.shape == (1, 1)
