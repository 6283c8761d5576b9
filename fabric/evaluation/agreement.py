# SPDX-License-Identifier: Apache-2.0
"""Votes of all ranks, at once or while the loop goes on."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from fabric.strategies import Strategy


class Agreement:
    """Asks all ranks a yes-or-no question, and keeps the votes whose answers nobody has waited for yet."""

    def __init__(self) -> None:
        self._started: dict[str, Callable[[], bool]] = {}

    def vote(self, call: str, flag: Any, strategy: Strategy, *, all: bool, wait: bool) -> bool:
        """Start a vote, and return its answer or, without waiting, that of the vote before it.

        Args:
            call: The question; each has a series of votes of its own.
            flag: What this rank says: a bool, or a tensor with one element.
            strategy: Carries the votes.
            all: Whether all ranks have to say True, and not any.
            wait: False returns the answer of the last vote that was started so, and `all` where there is none.
        """
        answer = strategy.start_boolean_decision(_as_bool(call, flag), all)
        if wait:
            return answer()
        last, self._started[call] = self._started.get(call), answer
        return all if last is None else last()


def _as_bool(call: str, flag: Any) -> bool:
    if isinstance(flag, Tensor) and flag.numel() != 1:
        raise ValueError(
            f"`fabric.{call}(flag)` takes one yes or no, and this tensor has the shape {tuple(flag.shape)}."
            " Reduce it first, for example with `.any()`."
        )
    if not isinstance(flag, bool | np.bool_ | Tensor):
        raise TypeError(
            f"`fabric.{call}(flag)` takes a bool or a tensor with one element, but got `{type(flag).__name__}`."
        )
    return bool(flag)
