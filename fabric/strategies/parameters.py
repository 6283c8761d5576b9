# SPDX-License-Identifier: Apache-2.0
"""Following parameters that change identity between the user's optimizer and the set-up module."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer


class ParameterMap:
    """Which new parameter took the place of which old one, found by name.

    Moving to another device type, or sharding, may put new `Parameter` objects into a module. An optimizer that was
    made before still holds the old ones and would train nothing.
    """

    def __init__(self) -> None:
        # The old parameter is held weakly, so that its memory is free as soon as the user lets go of it.
        self._replaced: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    @contextmanager
    def follow(self, module: Module) -> Iterator[None]:
        """Note which parameters of `module` are replaced inside the `with` block."""
        before = dict(module.named_parameters(remove_duplicate=False))
        yield
        after = dict(module.named_parameters(remove_duplicate=False))
        for name, old in before.items():
            new = after.get(name, old)
            if new is not old:
                self._replaced[id(old)] = (weakref.ref(old, self._forgetter(id(old))), new)

    def _forgetter(self, key: int) -> Callable[[Any], None]:
        """Lets go of a new parameter when nobody can ask for it any more, and so of the memory of its model."""
        owner = weakref.ref(self)

        def forget(_: Any) -> None:
            if (parameters := owner()) is not None:
                parameters._replaced.pop(key, None)

        return forget

    def current(self, parameter: Tensor) -> Tensor:
        """The parameter that stands now where `parameter` stood; itself if it was not replaced."""
        old, new = self._replaced.get(id(parameter), (None, parameter))
        if old is None or old() is not parameter:
            return parameter
        return self.current(new)

    def repoint(self, optimizer: Optimizer) -> None:
        """Put the current parameters into the optimizer's groups and state, in place."""
        if not self._replaced:
            return
        for group in optimizer.param_groups:
            parameters = group["params"]
            parameters[:] = map(self.current, list(parameters))  # the same list, since L-BFGS holds it too
        for parameter in list(optimizer.state):
            new = self.current(parameter)
            if new is not parameter:
                optimizer.state[new] = optimizer.state.pop(parameter)
