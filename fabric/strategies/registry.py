# SPDX-License-Identifier: Apache-2.0
"""The dictionary of strategy names."""

from collections.abc import Callable
from typing import Any

from fabric.strategies.strategy import Strategy


class _OnUse:
    """A strategy of this package that is imported when it is made: most programs have no use for it.

    Args:
        name: Its name in the package.
        get: The package's `__getattr__`.
        options: Arguments of its constructor.
    """

    def __init__(self, name: str, get: Callable[[str], Any], **options: Any) -> None:
        self._name = name
        self._get = get
        self._options = options

    def __call__(self) -> Strategy:
        strategy: Strategy = self._get(self._name)(**self._options)
        return strategy

    def makes(self, kind: type[Strategy]) -> bool:
        """Whether it is nothing but this class."""
        return not self._options and kind is self._get(self._name)


class StrategyRegistry(dict[str, Callable[[], Strategy]]):
    """Names for `Fabric(strategy="name")`, each with a function that makes the strategy."""

    def available_strategies(self) -> list[str]:
        """The names, sorted."""
        return sorted(self)

    def stands_for(self, name: str, kind: type[Strategy]) -> bool:
        """Whether the name makes this class, and says no more."""
        make = self[name]
        return make.makes(kind) if isinstance(make, _OnUse) else make is kind
