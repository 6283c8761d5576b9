# SPDX-License-Identifier: Apache-2.0
"""Letting some ranks run a block before the others."""

from collections.abc import Iterator
from contextlib import contextmanager

from fabric.strategies.strategy import Strategy


@contextmanager
def first_ranks_first(strategy: Strategy, first: bool) -> Iterator[None]:
    """The ranks that say `first` run the block, then the others do; where one of the first fails, all ranks raise.

    Raises:
        RuntimeError: On the other ranks, if a first one failed inside the block.
    """
    if not first:
        errors: list[str | None] = strategy.gather_objects(None)
        for rank, text in enumerate(errors):
            if text is not None:
                raise RuntimeError(f"Rank {rank} failed inside `fabric.rank_zero_first()`: {text}")
        yield
        return
    error: str | None = None
    try:
        yield
    except BaseException as exception:
        error = f"{type(exception).__name__}: {exception}"
        raise
    finally:
        strategy.gather_objects(error)
