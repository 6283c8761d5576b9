# SPDX-License-Identifier: Apache-2.0
"""Seeding the random number generators of this process, and keeping their states."""

import hashlib
import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fabric.utilities.rank_zero import global_rank, rank_zero_info, rank_zero_warn

MAX_SEED = 2**32 - 1  # NumPy's bound is the tightest of the three


class _LastCall:
    """What `seed_everything` was last told in this process. As process-wide as the generators that it seeds."""

    seed: int | None = None
    workers: bool = False


_last = _LastCall()


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's `random`, NumPy and PyTorch (each device too, once it is used) in this process.

    Args:
        seed: 0 to 4294967295. None draws one at random; each process draws its own.
        workers: Also seed the worker processes of loaders that are set up afterwards, once per batch, from the seed,
            the epoch and the index of the batch, so that random augmentation can be repeated.
        verbose: Log the seed on rank 0, at INFO level. A seed that was drawn is always logged.

    Returns:
        The seed.

    Raises:
        TypeError: If the seed is no integer.
        ValueError: If it is out of bounds.

    Example:
        >>> seed_everything(42)
        42
    """
    drawn = seed is None
    # Not from `random`: a program that was seeded before shall not get the same "random" seed in each run.
    seed = random.SystemRandom().randint(0, MAX_SEED) if seed is None else _validate_seed(seed)
    if drawn:
        rank_zero_info(f"No seed was given. `seed_everything` drew {seed}.")
    elif verbose:
        rank_zero_info(f"Seed set to {seed}")
    _last.seed, _last.workers = seed, bool(workers)
    _seed_all(seed)
    return seed


def _validate_seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(
            f"`seed_everything({seed!r})` takes an integer, but got `{type(seed).__name__}`."
            f" Pass an `int` from 0 to {MAX_SEED}."
        ) from None
    if not 0 <= number <= MAX_SEED:
        raise ValueError(f"`seed_everything({seed!r})` is out of bounds. Pass an `int` from 0 to {MAX_SEED}.")
    return number


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & MAX_SEED)
    torch.manual_seed(seed)


def reset_seed() -> None:
    """Seed again with the seed of the last `seed_everything` in this process; without one, do nothing."""
    if _last.seed is not None:
        _seed_all(_last.seed)


def take_seeding() -> dict[str, Any] | None:
    """What a process that is to go on from here has to be given; None where `seed_everything` was not called."""
    return None if _last.seed is None else {"last": vars(_last).copy(), "states": collect_rng_states(devices=False)}


def give_seeding(seeding: Mapping[str, Any] | None) -> None:
    """Take over what `take_seeding` returned in another process. Python reseeds `random` in a fork, so there too."""
    if seeding is not None:
        _last.seed, _last.workers = seeding["last"]["seed"], seeding["last"]["workers"]
        torch.manual_seed(seeding["last"]["seed"])  # the devices too
        _set_rng_states(seeding["states"])


def workers_are_seeded() -> bool:
    """Whether the last `seed_everything` in this process asked for seeded workers."""
    return _last.workers


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """A `worker_init_fn` for loaders that are not set up: other random numbers in each worker of each rank.

    Args:
        worker_id: Given by the loader.
        rank: Global rank; by default that of this process. With workers that are not forked bind it yourself:
            `functools.partial(pl_worker_init_function, rank=fabric.global_rank)`.
    """
    rank = global_rank() if rank is None else rank
    _seed_all(derive_seed(torch.initial_seed(), worker_id, rank))


def derive_seed(*entropy: int) -> int:
    """A seed of 63 bits that depends on all of the numbers, the same in every process and on every machine."""
    digest = hashlib.blake2b(repr([int(number) for number in entropy]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_batch(seed: int) -> None:
    """Seed what augmentation draws from on the CPU, within a few microseconds: made to be called for every batch."""
    random.seed(seed)
    np.random.seed(seed & MAX_SEED)
    torch.default_generator.manual_seed(seed)


# --------------------------------------------------------------------------------------------------------------------
# Keeping states
# --------------------------------------------------------------------------------------------------------------------
def collect_rng_states(*, devices: bool = True) -> dict[str, Any]:
    """The states of this process's generators, as plain values and tensors that `weights_only=True` loads.

    Args:
        devices: Include CUDA and MPS, once this process has used them.
    """
    _, keys, position, has_gauss, gauss = np.random.get_state()
    numpy_state = {
        "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }
    states: dict[str, Any] = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    if devices and torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
        states["cuda_device"] = torch.cuda.current_device()
    if devices and torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_rng_states(
    states: Sequence[Mapping[str, Any]],
    *,
    rank: int = 0,
    world_size: int = 1,
    data_rank: int | None = None,
    same_layout: bool = True,
) -> None:
    """Take back what `collect_rng_states` returned on each rank.

    With another number of ranks no state belongs to anybody: each rank is then seeded anew, from rank 0's old state and
    its own place, and rank 0 warns. So it is where as many ranks share out the batches in another way.

    Args:
        states: One entry per rank of the run that collected them.
        rank: Global rank of this process.
        world_size: Number of ranks now.
        data_rank: Ranks with the same one draw alike when they are seeded anew, as those of a tensor group have to; by
            default the global rank.
        same_layout: Whether the ranks share out batches as those did that collected the states.
    """
    if len(states) == world_size and same_layout:
        _set_rng_states(states[rank])
        return
    now, before = f"this run has {world_size}", "with as many ranks as before"
    if len(states) == world_size:
        now, before = "this run's share batches in another way", "with the strategy of before"
    rank_zero_warn(
        f"The states of the random number generators were saved by {len(states)} ranks, and {now}."
        f" Each rank is seeded anew from them; a run {before} would continue to the last bit."
    )
    _seed_all(derive_seed(*states[0]["torch"].tolist(), rank if data_rank is None else data_rank) & MAX_SEED)


def _set_rng_states(states: Mapping[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = states["numpy"]
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"]))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
        if "cuda_device" in states:  # this rank's device may have had another number
            torch.cuda.set_rng_state(states["cuda"][states["cuda_device"]])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


class IsolatedRandom:
    """A context with random number generators of its own: seeded at first, then continued each time it is entered.

    Outside of it the generators of the process are as if it had never been entered. The devices' are left alone.

    Args:
        seed: Where the generators start.
        generators: Further PyTorch generators that are seeded inside and restored outside.

    Example:
        >>> isolated = IsolatedRandom(0)
        >>> with isolated:
        ...     first = torch.rand(1)
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._seed = seed
        self._generators = (torch.default_generator, *generators)
        self._inner: tuple[Any, Any, list[torch.Tensor]] | None = None
        self._outer: tuple[Any, Any, list[torch.Tensor]] | None = None

    def __enter__(self) -> None:
        self._outer = self._take()
        if self._inner is not None:
            self._put(self._inner)
            return
        random.seed(self._seed)
        np.random.seed(self._seed & MAX_SEED)
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        self._inner = self._take()
        self._put(self._outer)

    def _take(self) -> tuple[Any, Any, list[torch.Tensor]]:
        return random.getstate(), np.random.get_state(), [generator.get_state() for generator in self._generators]

    def _put(self, states: tuple[Any, Any, list[torch.Tensor]]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for generator, state in zip(self._generators, states[2], strict=True):
            generator.set_state(state)
