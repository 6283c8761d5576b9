# SPDX-License-Identifier: Apache-2.0
"""From sizes to meshes: arithmetic, and the meshes of a world of 64 ranks without its processes."""

import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from fabric.strategies.model_parallel import resolve_sizes
from fabric.strategies.sharding.mesh import MeshSizes, divide

HOUR = timedelta(hours=1)


def asked(data="auto", tensor="auto", context=1, replicate=1):
    return {
        "replicate_size": replicate,
        "data_parallel_size": data,
        "context_parallel_size": context,
        "tensor_parallel_size": tensor,
    }


@pytest.mark.parametrize(
    ("sizes", "world_size", "machines", "splits", "expected"),
    [
        # nothing said: a tensor group is a machine, and without a function that splits, all is data parallel
        (asked(), 8, 1, True, (1, 1, 1, 8)),
        (asked(), 64, 8, True, (1, 8, 1, 8)),
        (asked(), 8, 1, False, (1, 8, 1, 1)),
        (asked(), 1, 1, True, (1, 1, 1, 1)),
        # one of the two said: the other takes the rest
        (asked(data=2), 8, 1, True, (1, 2, 1, 4)),
        (asked(tensor=2), 8, 1, True, (1, 4, 1, 2)),
        (asked(tensor=16), 64, 8, True, (1, 4, 1, 16)),
        (asked(data=8), 8, 1, False, (1, 8, 1, 1)),
        # all said
        (asked(data=4, tensor=2, context=2, replicate=4), 64, 8, True, (4, 4, 2, 2)),
        # the others leave less than a machine
        (asked(context=2), 8, 1, True, (1, 1, 2, 4)),
        (asked(replicate=2), 8, 1, True, (2, 1, 1, 4)),
        (asked(replicate=2), 64, 8, True, (2, 4, 1, 8)),
        (asked(context=4, replicate=2), 64, 8, True, (2, 1, 4, 8)),
        (asked(context=3), 12, 3, True, (1, 1, 3, 4)),
        (asked(context=2, replicate=2), 8, 1, False, (2, 2, 2, 1)),
        (asked(context=4, replicate=2, data=1), 64, 8, True, (2, 1, 4, 8)),
    ],
)
def test_sizes_that_nobody_said(sizes, world_size, machines, splits, expected):
    found = resolve_sizes(sizes, world_size, machines, splits=splits)
    assert (found.replicate, found.data, found.context, found.tensor) == expected
    assert found.world_size == world_size
    assert found.hybrid == (expected[0] > 1)


@pytest.mark.parametrize(
    ("sizes", "world_size", "product", "known"),
    [
        (asked(data=2, tensor=3), 4, "replicate_size=1 * data_parallel_size=2 * {}=1 * tensor_parallel_size=3", 6),
        (asked(data=1, tensor=2), 4, "replicate_size=1 * data_parallel_size=1 * {}=1 * tensor_parallel_size=2", 2),
        (asked(tensor=3), 4, "replicate_size=1 * data_parallel_size=auto * {}=1 * tensor_parallel_size=3", 3),
        (asked(data=8), 4, "replicate_size=1 * data_parallel_size=8 * {}=1 * tensor_parallel_size=auto", 8),
    ],
)
def test_sizes_that_do_not_multiply_show_their_product(sizes, world_size, product, known):
    with pytest.raises(ValueError, match="ModelParallelStrategy") as caught:
        resolve_sizes(sizes, world_size, 1, splits=True)
    assert str(caught.value) == (
        f"`ModelParallelStrategy`: {product.format('context_parallel_size')} can't be divided over {world_size}"
        f" processes: the sizes multiply to {known}. Make them multiply to {world_size}, or leave one of them 'auto'."
    )


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, None])
def test_what_is_no_size(size):
    with pytest.raises(ValueError, match="is not a number of ranks") as caught:
        divide("MyStrategy", 4, {"data_parallel_size": size})
    assert str(caught.value) == (
        f"`MyStrategy(data_parallel_size={size!r})` is not a number of ranks. Write 1 or more, or 'auto'."
    )


@pytest.fixture
def world_of_64(monkeypatch):
    """A world in which no other rank exists; collectives do nothing."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # PyTorch puts its own there and leaves it
    dist.init_process_group("fake", rank=37, world_size=64)
    yield 37
    dist.destroy_process_group()


def coordinates(mesh):
    return dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))


def test_ranks_stand_in_the_mesh_as_documented(world_of_64):
    sizes = MeshSizes(replicate=2, data=4, context=2, tensor=4, hybrid=True)
    # 37 = ((1 * 4 + 0) * 2 + 1) * 4 + 1
    mesh = sizes.build("cpu", HOUR, tensor_dimension=True)
    assert mesh.shape == (2, 8, 4)
    assert coordinates(mesh) == {"replicate": 1, "shard": 1, "tensor_parallel": 1}
    context = sizes.build_context("cpu", HOUR)
    assert context.mesh_dim_names == ("context_parallel",)
    assert context.mesh.tolist() == [33, 37]
    assert mesh["tensor_parallel"].mesh.tolist() == [36, 37, 38, 39]
    assert (sizes.data_parallel_size, sizes.data_parallel_rank(37)) == (8, 4)


def test_without_copies_the_mesh_has_one_dimension_for_data(world_of_64):
    sizes = MeshSizes(data=8, context=2, tensor=4)
    mesh = sizes.build("cpu", HOUR, tensor_dimension=True)
    assert mesh.mesh_dim_names == ("data_parallel", "tensor_parallel")
    assert mesh.shape == (16, 4)
    assert mesh["data_parallel"].mesh.tolist() == list(range(1, 64, 4))


def test_a_mesh_without_tensor_parallel(world_of_64):
    assert MeshSizes(data=64).build("cpu", HOUR, tensor_dimension=False).mesh_dim_names == ("data_parallel",)
    hybrid = MeshSizes(replicate=4, data=16, hybrid=True).build("cpu", HOUR, tensor_dimension=False)
    assert coordinates(hybrid) == {"replicate": 2, "shard": 5}


def test_all_ranks_of_a_tensor_and_context_group_read_the_same_data():
    sizes = MeshSizes(replicate=2, data=2, context=2, tensor=2, hybrid=True)
    parts = [sizes.data_parallel_rank(rank) for rank in range(sizes.world_size)]
    assert parts == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
