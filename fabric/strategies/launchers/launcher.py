# SPDX-License-Identifier: Apache-2.0
"""The base of the launchers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Launcher(ABC):
    """Starts the other ranks of this machine, watches them, and ends all of them together."""

    @abstractmethod
    def launch(self, enter: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Start the ranks of this machine and run `enter(environment, *args, **kwargs)` on each.

        Args:
            enter: Called on every rank with that rank's cluster environment; it joins the process group.

        Returns:
            What the call on the first rank of this machine returned.
        """

    def teardown(self) -> None:
        """Take away the hooks and signal handlers that `launch` has installed."""
