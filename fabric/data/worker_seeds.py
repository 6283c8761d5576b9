# SPDX-License-Identifier: Apache-2.0
"""Seeding augmentation once per batch, in a loader's worker or in the process that has none.

[Note: seeds travel with the indices] A worker receives the indices of each batch through a queue and then loads it.
The indices that we send unpickle into plain ones *and* seed the worker on the way, so that what augmentation draws
depends on (seed, epoch, batch index, rank) only: not on the number of workers, on prefetching, or on where a run
was resumed. A loader without workers gets the same numbers: it makes each batch with random number generators of its
own, so that those of the loop stay as they are.
"""

import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fabric.utilities.seed import derive_seed, seed_batch


def seeded(items: Iterator[Any], entropy: tuple[int, ...], first: int) -> Iterator[Any]:
    """The items of a sampler, each with its seed.

    Args:
        items: Indices or lists of them, or whatever the data set takes.
        entropy: What the seeds depend on besides the number of the batch.
        first: Number of the first batch.
    """
    for number, item in enumerate(items, first):
        item = _KINDS.get(type(item), _SeededItem)(item)
        item.seed = derive_seed(*entropy, number)
        yield item


class _SeededBatch(list[Any]):
    seed: int

    def __reduce__(self) -> Any:
        return _seed_and_return, (list(self), self.seed)


class _SeededIndex(int):
    seed: int

    def __reduce__(self) -> Any:
        return _seed_and_return, (int(self), self.seed)


class _SeededItem:
    """Anything else; what unpickles is the item itself."""

    seed: int

    def __init__(self, item: Any) -> None:
        self._item = item

    def __reduce__(self) -> Any:
        return _seed_and_return, (self._item, self.seed)


_KINDS: dict[type, Any] = {list: _SeededBatch, int: _SeededIndex}


def _seed_and_return(item: Any, seed: int) -> Any:
    seed_batch(seed)
    return item


class SeededHere(Iterator[Any]):
    """The batches of a loader without workers, each made from its own seed.

    Args:
        batches: Makes a batch in this process whenever one is asked for.
        entropy: What the seeds depend on besides the number of the batch; None where they are set elsewhere.
        first: Number of the first batch.
    """

    def __init__(self, batches: Iterator[Any], entropy: tuple[int, ...] | None, first: int = 0) -> None:
        self._batches = batches
        self._entropy = entropy
        self._number = first
        self._numpy = np.random.MT19937()

    def __next__(self) -> Any:
        with _generators_of_its_own(self._numpy):
            if self._entropy is not None:
                seed_batch(derive_seed(*self._entropy, self._number))
            self._number += 1
            return next(self._batches)


@contextmanager
def _generators_of_its_own(bits: "np.random.MT19937") -> Generator[None]:
    """Keep the process's random numbers as they are outside.

    NumPy's generator is exchanged, which takes a hundredth of the time that its state takes; a second normal number
    that it may hold in reserve is lost.
    """
    python, default = random.getstate(), torch.default_generator.get_state()
    numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(bits)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]
        torch.default_generator.set_state(default)
