# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import torch
from torch import nn

from fabric import Fabric
from tests.ranks import run_ranks


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.body[0].bias.requires_grad_(False)


def test_the_table() -> None:
    summary = Fabric(accelerator="cpu").summary(_Net(), optimizer_values=1)
    assert str(summary).splitlines() == [
        "module     type        parameters  trainable  dtype             device  memory",
        "(model)    _Net                68         64  float32, float64  cpu      352 B",
        "embedding  Embedding           40         40  float32           cpu      160 B",
        "body       Sequential          28         24  float64, float32  cpu      192 B",
        "head       Linear              40         40  float32           cpu      160 B",
        "",
        "68 parameters: 64 trainable, 4 frozen",
        "On this device: 1.0 KiB = parameters 352 B + buffers 40 B + gradients 320 B + optimizer 320 B (estimated)",
        "`head.weight` is `embedding.weight`: tied, counted once.",
    ]
    assert summary.memory == 352 + 40 + 320 + 320
    assert not summary.sharded


@pytest.mark.parametrize(("depth", "names"), [(0, [""]), (-1, ["", "embedding", "body", "body.0", "body.1", "head"])])
def test_depth(depth, names) -> None:
    assert [row.name for row in Fabric(accelerator="cpu").summary(_Net(), depth).rows] == names


def test_set_up_and_compiled_models_show_the_users_modules() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-true")
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    plain[1] = torch.compile(plain[1], backend="eager")
    summary = fabric.summary(fabric.setup(plain), -1)
    assert [(row.name, row.kind) for row in summary.rows][:2] == [("", "Sequential"), ("0", "Linear")]
    assert "1.0" in {row.name for row in summary.rows}
    assert summary.rows[0].dtypes == ("bfloat16",)
    assert summary.parameter_memory == 12 * 2
    assert summary.optimizer_memory == 2 * summary.gradient_memory


def test_meta_and_lazy_parameters_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.LazyLinear(3), nn.Linear(3, 3, device="meta"))
    summary = Fabric(accelerator="cpu").summary(model)
    assert (summary.parameters, summary.rows[2].parameters) == (18, 0)
    assert str(summary).splitlines()[-2:] == [
        "On the meta device, without memory yet: `0.weight`, `0.bias`, `2.weight` and 1 more.",
        "Not initialised before the first forward, and not counted: `1.weight`, `1.bias`.",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": -2}, "`fabric.summary(depth=-2)` is too small. Write 0 or more, or -1 for all levels."),
        (
            {"optimizer_values": -1},
            "`fabric.summary(optimizer_values=-1)` is negative. Write 2 for Adam, 1 for SGD with momentum, 0 for SGD"
            " without.",
        ),
    ],
)
def test_wrong_arguments(options, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Fabric(accelerator="cpu").summary(_Net(), **options)


def _on_ranks(context):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    fabric = context.fabric(strategy="ddp")
    replicated = fabric.summary(fabric.setup(nn.Linear(4, 3)))
    model = nn.Linear(4, 3, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    sharded = fabric.summary(model)
    texts = [str(summary).splitlines()[-1].split(":")[0] for summary in (replicated, sharded)]
    numbers = [(summary.parameters, summary.parameter_memory) for summary in (replicated, sharded)]
    return texts, numbers, sharded.sharded


@pytest.mark.ranks
def test_copies_and_parts() -> None:
    first, second = run_ranks(2, _on_ranks)
    assert first[0] == second[0] == ["On each of 2 ranks (a full copy)", "On each of 2 ranks (its own part)"]
    assert first[1:] == ([(15, 60), (12, 2 * 4 * 4)], True)
    assert second[1:] == ([(15, 60), (12, 1 * 4 * 4)], True)
