# SPDX-License-Identifier: Apache-2.0
"""Debug mode where parameters are split: who is compared with whom, and what is found."""

import pytest
import torch
from torch.utils.data import DataLoader

from fabric.debugging.debug_checks import _BATCH_ADVICE, _PARAMETERS_ADVICE
from fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tests.debugging.jobs import debugged, error_of
from tests.ranks import run_ranks
from tests.strategies.nets import batch, loss_of, net, split_layers

pytestmark = pytest.mark.ranks


def replicas(context):
    """For a parameter that is split, one that is whole, and one in its second dimension."""
    found = []
    for strategy in (
        ModelParallelStrategy(split_layers, tensor_parallel_size=4),
        ModelParallelStrategy(split_layers, tensor_parallel_size=2),
        ModelParallelStrategy(split_layers, tensor_parallel_size=2, replicate_size=2),
        FSDPStrategy(device_mesh=(2, 2)),
        FSDPStrategy(),
    ):
        model = context.fabric(strategy=strategy).setup(net())
        block = model.module.blocks[0]
        found.append([strategy.replicas_of(p) for p in (block.up.weight, block.norm.weight, block.down.weight)])
    return found


def test_who_holds_the_same():
    everywhere, alone = (0, 1, 2, 3), [(0,), (1,), (2,), (3,)]
    pairs, crosses = [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)]
    for rank, found in enumerate(run_ranks(4, replicas)):
        assert found[0] == [alone[rank], everywhere, alone[rank]]
        assert found[1] == [alone[rank], pairs[rank], alone[rank]]
        assert found[2] == [crosses[rank], everywhere, crosses[rank]]
        assert found[3] == [crosses[rank]] * 3
        assert found[4] == [alone[rank]] * 3


def step(fabric, model, optimizer, words):
    fabric.backward(loss_of(model(words), words))
    optimizer.step()
    optimizer.zero_grad()


def drift(fabric, rank):
    """A norm that is whole on each rank of a tensor group, and that one of them changes."""
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    words = batch(0)[fabric.strategy.data_parallel_rank :: fabric.strategy.data_parallel_size]
    step(fabric, model, optimizer, words)
    with torch.no_grad():
        norm = model.module.norm.bias
        local = norm.to_local() if hasattr(norm, "to_local") else norm
        local += rank == 1
    step(fabric, model, optimizer, words)


def read_other_data(fabric, rank):
    data = torch.arange(8) + 100 * (rank == 1)
    return [x.tolist() for x in fabric.setup_dataloaders(DataLoader(data, batch_size=2))]


def nothing_wrong(fabric, rank):
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for words in fabric.setup_dataloaders(DataLoader(batch(0, size=8), batch_size=2)):
        fabric.backward(loss_of(model(words), words))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(batch(1))


def debug_cases(context):
    found = []
    for case in (nothing_wrong, drift, read_other_data):
        fabric = debugged(context, strategy=ModelParallelStrategy(split_layers, tensor_parallel_size=2))
        found.append(error_of(case, fabric))
        fabric.teardown()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_debug_mode_compares_what_should_be_equal_in_a_tensor_group(world_size):
    ranks = run_ranks(world_size, debug_cases)
    for rank, (nothing, parameters, batches) in enumerate(ranks):
        first = rank // 2 * 2
        found = f"is not the same on all ranks: rank {first} | rank {first + 1}."
        assert nothing == "fine"
        # the first of the parameters that the changed norm has led astray, by way of their gradients
        assert parameters.endswith(f"`embedding.weight` {found} {_PARAMETERS_ADVICE}")
        assert batches.endswith(f"`batch` {found} {_BATCH_ADVICE}" if rank < 2 else "fine")
