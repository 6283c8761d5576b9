# SPDX-License-Identifier: Apache-2.0
"""The dictionary of strategy names."""

from collections.abc import Callable

from fabric.strategies.strategy import Strategy


class StrategyRegistry(dict[str, Callable[[], Strategy]]):
    """Names for `Fabric(strategy="name")`, each with a function that makes the strategy."""

    def available_strategies(self) -> list[str]:
        """The names, sorted."""
        return sorted(self)
