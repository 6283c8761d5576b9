# SPDX-License-Identifier: Apache-2.0
"""The checks that Fabric asks for; here, without debug mode, each does nothing."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch.nn import Module
from torch.optim import Optimizer

T = TypeVar("T")


class Checks:
    """What runs without debug mode: nothing. `DebugChecks` overrides all of it.

    Fabric asks at setup and at its collectives. Forward, backward and step are never asked here: what debug mode wants
    to see of them it hooks into the module and the optimizer, at setup.
    """

    def enter(self) -> None:
        """Runs once on every rank, when it has joined the process group."""

    def leave(self) -> None:
        """Runs once on every rank, before it leaves the process group."""

    def call(self, name: str, /, *data: Any, **options: Any) -> None:
        """Runs on every rank when `fabric.<name>` is called, before anything is sent.

        Args:
            name: The method.
            *data: What it was given, where shapes and dtypes must be the same on all ranks.
            **options: What else must be the same; `group` is the process group that the call is for.
        """

    def watch(self, forward_module: Module, module: Module, *, compiled: bool) -> None:
        """Runs once for each module that is set up.

        Args:
            forward_module: What the strategy made of it.
            module: The user's module.
            compiled: Whether it is compiled around the strategy's module.
        """

    def watch_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Runs once for each optimizer that is set up, with the user's own."""

    def batches(self, move: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        """What moves the batches of a loader (None: nothing does), with a check of each; runs once per loader."""
        return move

    def same_data(self, name: str, batch: Any) -> None:
        """Runs where ranks that read the same data are about to share it.

        Args:
            name: What it is, for the error.
            batch: What should be the same on these ranks.
        """

    def uneven(self, context: AbstractContextManager[T]) -> AbstractContextManager[T]:
        """A context in which ranks take unlike numbers of steps."""
        return context
