# SPDX-License-Identifier: Apache-2.0
"""Seeding a loader's worker once per batch.

[Note: seeds travel with the indices] A worker receives the indices of each batch through a queue and then loads it.
The indices that we send unpickle into plain ones *and* seed the worker on the way, so that what augmentation draws
depends on (seed, epoch, batch index, rank) only: not on the number of workers, on prefetching, or on where a run
was resumed.
"""

from collections.abc import Iterator
from typing import Any

from fabric.utilities.distributed import DistributedSamplerWrapper
from fabric.utilities.seed import derive_seed, seed_batch


def seeded(items: Iterator[Any], order: DistributedSamplerWrapper, first: int) -> Iterator[Any]:
    """The items of a sampler, each with its seed.

    Args:
        items: Indices or lists of them.
        order: Where they come from.
        first: Index of the first batch.
    """
    return _seeded(items, (order.seed, order.epoch, order.rank), first)  # the epoch of now: it may advance later


def _seeded(items: Iterator[Any], entropy: tuple[int, ...], first: int) -> Iterator[Any]:
    for number, item in enumerate(items, first):
        kind = _KINDS.get(type(item))
        if kind is not None:
            item = kind(item)
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


_KINDS: dict[type, Any] = {list: _SeededBatch, int: _SeededIndex}


def _seed_and_return(item: Any, seed: int) -> Any:
    seed_batch(seed)
    return item
