# SPDX-License-Identifier: Apache-2.0
"""Hooks that debug mode leaves on the user's modules."""

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A hook that may be copied and pickled with its module; in another process it does nothing.

    Args:
        function: What it calls.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: Any) -> "ModuleHook":
        return self

    def __reduce__(self) -> Any:
        return ModuleHook, (_nothing,)


def _nothing(*args: Any) -> None:
    pass
