# SPDX-License-Identifier: Apache-2.0
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.debugging.debug_checks import _BATCH_ADVICE, _BUFFERS_ADVICE, _PARAMETERS_ADVICE
from fabric.debugging.hashing import fingerprint
from fabric.strategies import DDPStrategy
from tests.debugging.jobs import debugged, error_of
from tests.ranks import RankContext, run_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1))


def one_step(fabric: Fabric, model: Any, optimizer: Any, rank: int) -> None:
    optimizer.zero_grad()
    fabric.backward(model(torch.arange(6.0).view(3, 2) + rank).square().mean())
    optimizer.step()


def spoil_parameter(fabric: Fabric, rank: int) -> None:
    model = net()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    one_step(fabric, wrapped, optimizer, rank)
    with torch.no_grad():
        model[3].bias += rank // 2  # type: ignore[operator,index]
    one_step(fabric, wrapped, optimizer, rank)


def spoil_before_save(fabric: Fabric, rank: int) -> None:
    model = fabric.setup_module(net())
    with torch.no_grad():
        model.module[0].weight[0, 0] += rank == 1
    fabric.save("file", {"model": model})


def spoil_buffer(fabric: Fabric, rank: int) -> None:
    model = net()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    one_step(fabric, wrapped, optimizer, rank)
    wrapped(torch.ones(3, 2))


class Promising(DDPStrategy):
    """Says that it has made the buffers equal, and has not."""

    def __init__(self) -> None:
        super().__init__(broadcast_buffers=False)

    def has_synced_buffers(self, module: nn.Module) -> bool:
        return True


def cases(context: RankContext) -> list[str]:
    fabric = debugged(context)
    found = [error_of(case, fabric) for case in (spoil_parameter, spoil_before_save)]
    fabric.teardown()
    return [*found, error_of(spoil_buffer, debugged(context, strategy=Promising()))]


def several_of_a_class(context: RankContext) -> bool:
    fabric = debugged(context)
    kept = []
    for _ in range(8):
        kept.append(fabric.setup_module(nn.Linear(1, 1)))
        kept.append([nn.Linear(1, 1) for _ in range(3 * context.rank)])  # addresses that differ over the ranks
    fabric.save("file", {"number": 1})
    return True


@pytest.mark.ranks
def test_modules_of_one_class_are_compared_each_with_itself() -> None:
    assert run_ranks(2, several_of_a_class) == [True, True]


@pytest.mark.ranks
def test_replicas_that_are_no_longer_equal() -> None:
    expected = [
        "RuntimeError: the parameters of `Sequential` after step 2 of optimizer 0 at "
        f"STEP: `3.bias` is not the same on all ranks: ranks 0-1 | ranks 2-3. {_PARAMETERS_ADVICE}",
        "RuntimeError: the parameters of `Sequential` at save at "
        f"+4: `0.weight` is not the same on all ranks: ranks 0, 2-3 | rank 1. {_PARAMETERS_ADVICE}",
        "RuntimeError: the buffers of `Sequential` in forward at "
        f"+4: `1.running_mean` is not the same on all ranks: rank 0 | rank 1 | rank 2 | rank 3. {_BUFFERS_ADVICE}",
    ]
    step = one_step.__code__.co_firstlineno + 3
    first = spoil_parameter.__code__.co_firstlineno
    expected[0] = expected[0].replace("STEP", f"+{step - first}")
    for found in run_ranks(4, cases):
        assert found == expected


class Pairs(DDPStrategy):
    """Two ranks each work on the same batches."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size // 2, "rank": self.global_rank // 2}


def read_alike(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(8.0), batch_size=2))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0 + rank // 2, 2 + rank // 2], [4 + rank // 2, 6 + rank // 2]]


def read_unlike(fabric: Fabric, rank: int) -> None:
    data = [{"x": torch.tensor([float(i)]), "n": 0, "rank": "text"} for i in range(8)]
    if rank == 3:
        data[5]["x"] += 1e-6  # type: ignore[operator]
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2))  # type: ignore[arg-type]
    for n, _ in enumerate(loader):
        read.append(n)


read: list[int] = []


def read_in_pairs(context: RankContext) -> Any:
    read.clear()
    fabric = debugged(context, strategy=Pairs())
    return error_of(read_alike, fabric), error_of(read_unlike, fabric), read


@pytest.mark.ranks
def test_ranks_that_share_data_read_the_same_batches() -> None:
    unlike = "RuntimeError: the batch of a loader at +5: `batch` is not the same on all ranks: rank 2 | rank 3. "
    unlike += _BATCH_ADVICE
    results = run_ranks(4, read_in_pairs)
    assert results[:2] == [("fine", "fine", [0, 1])] * 2
    assert results[2:] == [("fine", unlike, [0])] * 2


def train(context: RankContext, debug: bool) -> Any:
    fabric = debugged(context) if debug else context.fabric()
    model = net()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for turn in range(4):
        # One rank accumulates for longer: without synchronisation that is nobody else's business.
        for _ in range(1 + context.rank):
            with fabric.no_backward_sync(wrapped):
                fabric.backward(wrapped(torch.arange(6.0).view(3, 2) + turn).mean())
        one_step(fabric, wrapped, optimizer, context.rank)
        if context.rank == 0:
            with torch.no_grad():
                wrapped.module.eval()(torch.ones(1, 2))
                wrapped.train()
    with fabric.join_uneven_inputs(wrapped):
        for _ in range(1 + 2 * context.rank):
            one_step(fabric, wrapped, optimizer, context.rank)
    one_step(fabric, wrapped, optimizer, context.rank)
    fabric.save("file", {"model": wrapped, "optimizer": optimizer, "fabric": fabric})
    fabric.load("file", {"model": wrapped, "optimizer": optimizer, "fabric": fabric})
    return [tensor.detach().clone() for tensor in model.parameters()]


@pytest.mark.ranks
def test_what_it_watches_it_does_not_change() -> None:
    for found, expected in zip(run_ranks(2, train, True), run_ranks(2, train, False), strict=True):
        assert all(map(torch.equal, found, expected))


def every_so_often(context: RankContext) -> int:
    fabric = debugged(context, every=3)
    model = nn.Linear(2, 1)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model.bias += context.rank
    for step in range(1, 9):
        try:
            one_step(fabric, wrapped, optimizer, context.rank)
        except RuntimeError:
            return step
    return 0


@pytest.mark.ranks
def test_parameters_are_compared_every_n_steps() -> None:
    assert run_ranks(2, every_so_often) == [3, 3]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1, 2]), torch.tensor([[1, 2]])),
        (torch.tensor([1], dtype=torch.int32), torch.tensor([1], dtype=torch.int64)),
        ({"x": [1, 2.0]}, {"x": [1, 2.5]}),
        ([True], [False]),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (torch.zeros(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64).conj()),
    ],
)
def test_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)
    assert re.fullmatch("[0-9a-f]{16}", fingerprint(one))


def test_fingerprints_see_arrays_and_strides() -> None:
    numpy = pytest.importorskip("numpy")
    assert fingerprint([numpy.ones(2)]) != fingerprint([numpy.zeros(2)])
    tensor = torch.arange(6).view(2, 3)
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous()) != fingerprint(tensor.reshape(3, 2))
    assert fingerprint(Tensor()) == fingerprint(torch.ones(0))
