# SPDX-License-Identifier: Apache-2.0
import io
import logging
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fabric.utilities import seed as seed_module
from fabric.utilities.seed import (
    IsolatedRandom,
    collect_rng_states,
    derive_seed,
    pl_worker_init_function,
    reset_seed,
    seed_everything,
    set_rng_states,
    workers_are_seeded,
)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    seed_module._last.seed, seed_module._last.workers = None, False


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), float(np.random.randn()), torch.rand(1).item(), torch.randn(1).item()]


def test_it_seeds_python_numpy_and_torch() -> None:
    assert seed_everything(3) == 3
    first = draw()
    assert seed_everything(np.int64(3)) == 3
    assert draw() == first
    seed_everything(4)
    assert draw() != first
    assert seed_everything(0) == 0
    assert seed_everything(2**32 - 1) == 2**32 - 1


def test_the_seed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fabric")
    seed_everything(3)
    seed_everything(4, verbose=False)
    assert caplog.messages == ["Seed set to 3"]


def test_without_a_seed_one_is_drawn_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fabric")
    random.seed(0)
    first = seed_everything(verbose=False)
    random.seed(0)
    second = seed_everything(verbose=False)
    assert first != second
    assert caplog.messages == [f"No seed was given. `seed_everything` drew {seed}." for seed in (first, second)]
    assert torch.initial_seed() == second


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_out_of_bounds(seed: int) -> None:
    text = f"`seed_everything({seed})` is out of bounds. Pass an `int` from 0 to 4294967295."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        seed_everything(seed)


@pytest.mark.parametrize("seed", ["3", 1.0])
def test_no_integer(seed: Any) -> None:
    text = (
        f"`seed_everything({seed!r})` takes an integer, but got `{type(seed).__name__}`."
        " Pass an `int` from 0 to 4294967295."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        seed_everything(seed)


def test_reset_seed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    reset_seed()
    assert torch.equal(torch.get_rng_state(), before)
    seed_everything(3)
    first = draw()
    reset_seed()
    assert draw() == first


def test_workers_are_remembered() -> None:
    assert not workers_are_seeded()
    seed_everything(3, workers=True)
    assert workers_are_seeded()
    seed_everything(3)
    assert not workers_are_seeded()


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(draw(), dtype=torch.double)


def test_the_worker_init_function_tells_workers_apart() -> None:
    loader = DataLoader(Draws(), batch_size=1, num_workers=2, worker_init_fn=pl_worker_init_function)
    torch.manual_seed(0)
    first = [batch.tolist() for batch in loader]
    torch.manual_seed(0)
    assert [batch.tolist() for batch in loader] == first
    assert first[0] != first[1]


def test_the_worker_init_function_tells_ranks_apart() -> None:
    drawn = []
    with IsolatedRandom(0):
        for rank in (0, 1):
            torch.manual_seed(7)
            pl_worker_init_function(1, rank)
            drawn.append(draw())
    assert drawn[0] != drawn[1]


def test_a_derived_seed_depends_on_each_number() -> None:
    seeds = {derive_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, np.int64(1)) == 6259915670274912787  # the same in every process, on every machine


def test_states_come_back_through_a_safe_file() -> None:
    seed_everything(3)
    draw()
    buffer = io.BytesIO()
    torch.save([collect_rng_states()], buffer)
    expected = [draw(), draw()]
    seed_everything(4)
    buffer.seek(0)
    set_rng_states(torch.load(buffer, weights_only=True))
    assert [draw(), draw()] == expected


def test_with_another_number_of_ranks_each_is_seeded_anew() -> None:
    states = [collect_rng_states()]
    drawn = []
    text = re.escape(
        "The states of the random number generators were saved by 1 ranks, and this run has 2. Each rank is seeded anew"
        " from them; a run with as many ranks as before would continue to the last bit."
    )
    for rank in (0, 1, 1):
        with pytest.warns(UserWarning, match=f"^{text}$"):
            set_rng_states(states, rank=rank, world_size=2)
        drawn.append(draw())
    assert drawn[0] != drawn[1] == drawn[2]


def test_isolated_random_numbers() -> None:
    seed_everything(3)
    expected = [draw() for _ in range(3)]
    seed_everything(5)
    alone = [draw() for _ in range(3)]

    seed_everything(3)
    generator = torch.Generator().manual_seed(9)
    state = generator.get_state()
    isolated = IsolatedRandom(5, [generator])
    inside, outside, drawn = [], [], []
    for _ in range(3):
        with isolated:
            inside.append(draw())
            drawn.append(torch.rand(1, generator=generator).item())
        outside.append(draw())
    assert inside == alone
    assert outside == expected
    assert len(set(drawn)) == 3
    assert torch.equal(generator.get_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_devices_states_come_back() -> None:
    torch.cuda.manual_seed(3)
    torch.rand(3, device="cuda")
    states = [collect_rng_states()]
    expected = torch.rand(3, device="cuda")
    set_rng_states(states)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
