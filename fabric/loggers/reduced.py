# SPDX-License-Identifier: Apache-2.0
"""Metrics of all ranks made into one set of numbers, where the user asks for it."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor

from fabric.loggers.values import as_number
from fabric.strategies import Strategy
from fabric.utilities.spelling import suggest

MetricsReduce: TypeAlias = Literal["mean", "sum", "min", "max"]


def reduced(metrics: Mapping[str, Any], reduce: MetricsReduce, strategy: Strategy) -> dict[str, Any]:
    """Reduce numbers by name over all ranks, all of them in one collective; call it on every rank.

    Args:
        metrics: Name to number, or tensor of one element; the same names on every rank.
        reduce: `mean`, `sum`, `min` or `max`. NaN on one rank gives NaN.
        strategy: How to reach the other ranks.

    Raises:
        ValueError: On every rank, if `reduce` is not known, a value is not a number, or the names differ.
    """
    _validate_reduce(reduce)
    ranks = strategy.gather_objects(_numbers_or_refusal(metrics))
    refusals = [f"rank {rank}: {sent}" for rank, sent in enumerate(ranks) if isinstance(sent, str)]
    if refusals:
        raise ValueError(f"`log_dict(..., reduce={reduce!r})` takes numbers. Got {'; '.join(refusals)}.")
    numbers = [sent for sent in ranks if isinstance(sent, dict)]
    _validate_names(numbers)
    return {name: _REDUCTIONS[reduce]([sent[name] for sent in numbers]) for name in metrics}


def _numbers_or_refusal(metrics: Mapping[str, Any]) -> dict[str, Any] | str:
    """What this rank sends. An error is sent too: raised here at once, it would leave the others waiting."""
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            return f"a tensor of shape {tuple(value.shape)} for `{name}`"
        number = as_number(name, value)
        if not isinstance(number, Real):
            return f"a `{type(value).__name__}` for `{name}`"
        numbers[name] = number.item() if isinstance(number, np.generic) else number
    return numbers


def _validate_reduce(reduce: str) -> None:
    if reduce not in _REDUCTIONS:
        raise ValueError(f"`log_dict(..., reduce={reduce!r})` is not a known reduction. {suggest(reduce, _REDUCTIONS)}")


def _validate_names(ranks: Sequence[Mapping[str, Any]]) -> None:
    everywhere = set.intersection(*(set(numbers) for numbers in ranks))
    partly = {name: None for numbers in ranks for name in numbers if name not in everywhere}
    if partly:
        where = (f"`{name}` (on {_listed([r for r, n in enumerate(ranks) if name in n])})" for name in partly)
        raise ValueError(
            f"`log_dict(..., reduce=...)` needs the same names on all {len(ranks)} ranks, but some lack"
            f" {', '.join(where)}. Log those without `reduce`, or on every rank."
        )


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} only" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _mean(values: Sequence[Any]) -> float:
    return _sum(values) / len(values)  # type: ignore[no-any-return]


def _sum(values: Sequence[Any]) -> Any:
    """Exactly rounded for floats, exact for integers: the order of the ranks has no part in it."""
    plain = all(isinstance(value, int) for value in values) or not all(map(math.isfinite, values))
    return sum(values) if plain else math.fsum(values)


def _extreme(choose: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda values: math.nan if any(math.isnan(value) for value in values) else choose(values)


_REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean": _mean,
    "sum": _sum,
    "min": _extreme(min),
    "max": _extreme(max),
}
