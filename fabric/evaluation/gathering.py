# SPDX-License-Identifier: Apache-2.0
"""Every sample of the loader's last batch, once, on all ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fabric.checkpoint import Attempts, whole
from fabric.evaluation.layout import Layout, agree_on_layout
from fabric.evaluation.part import Part, part_of_this_rank
from fabric.evaluation.samples import map_by_sample
from fabric.strategies import Strategy
from fabric.strategies.padding import padded_to


def gather_for_metrics(
    data: Any, loader: Any, strategy: Strategy, *, in_order: bool = False, pad_value: float | None = None
) -> Any:
    """What all data-parallel ranks made of their last batches, without what repeats other samples.

    One small exchange tells each rank how many samples the others have and whether their values are alike; then comes
    one gather for each tensor, and one for all lists together. One process exchanges and copies nothing.

    Args:
        data: Tensors and arrays whose first dimension is the batch, lists with an item for each sample, nested.
        loader: A set-up loader, whose last batch `data` was made of.
        strategy: Carries the exchange.
        in_order: Whether the result is in the order of the data, and not rank by rank.
        pad_value: What fills up dimensions other than the first where ranks differ in them; None raises instead.

    Raises:
        TypeError, ValueError, RuntimeError: On every rank, if the data or the loader of one is no such thing.
    """
    if strategy.world_size == 1:
        part = part_of_this_rank(data, loader, strategy)
        return data if part.valid == part.size else map_by_sample(data, lambda value: value[: part.valid])
    attempts, part = Attempts(), Part()
    with attempts:
        part = part_of_this_rank(data, loader, strategy)
    layout = agree_on_layout(part, attempts, strategy, in_order=in_order, pad_value=pad_value)
    lists = [value[: part.valid] for value in part.values if isinstance(value, list | tuple)]
    results = iter(_join_lists(lists, layout, strategy))
    shapes = iter(layout.shapes)

    def gather(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(next(results))
        return _join_tensors(value[: part.valid], next(shapes), layout, strategy, pad_value or 0)

    return map_by_sample(data, gather)


def _join_tensors(value: Any, shape: tuple[int, ...], layout: Layout, strategy: Strategy, pad_value: float) -> Any:
    if isinstance(value, np.ndarray):
        value = np.require(value, requirements=("C", "W"))  # as PyTorch wants it; a copy only where it is not so
    tensor = whole(torch.as_tensor(value).detach())
    joined = padded_to(tensor, shape, pad_value)
    if layout.most:
        joined = strategy.gather_alike(joined.to(strategy.root_device)).flatten(0, 1)
        if not layout.is_plain:
            joined = joined[layout.places.to(joined.device)]
    joined = joined.to(tensor.device)
    return joined.numpy() if isinstance(value, np.ndarray) else joined


def _join_lists(values: list[Any], layout: Layout, strategy: Strategy) -> Iterator[list[Any]]:
    """Each of this rank's lists with the items of all ranks."""
    if not values:
        return
    gathered = strategy.gather_objects(values)
    places = [divmod(place, layout.most) for place in layout.places.tolist()]
    for number in range(len(values)):
        yield [gathered[process][number][sample] for process, sample in places]
