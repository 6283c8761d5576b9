# SPDX-License-Identifier: Apache-2.0
"""The optimizer that `fabric.setup` returns."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from fabric.strategies import Strategy

# What stays on the wrapper: its own two fields, and what a learning-rate scheduler writes.
_OWN = frozenset(("_optimizer", "_strategy", "step", "_opt_called"))


class _FabricOptimizer(Optimizer):
    """The user's optimizer, stepped through the strategy; in all else both objects show the same values.

    Args:
        optimizer: The user's optimizer.
        strategy: The strategy.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy) -> None:
        # `Optimizer.__init__` would make groups and state of its own.
        self._optimizer = optimizer
        self._strategy = strategy

    @property
    def optimizer(self) -> Optimizer:
        """The user's own optimizer."""
        return self._optimizer

    @override
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take one step through the strategy and the precision."""
        if closure is not None:
            kwargs["closure"] = closure
        return self._strategy.optimizer_step(self._optimizer, **kwargs)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self._optimizer.zero_grad(set_to_none)
        if self._strategy.shards_parameters:
            self._strategy.drop_unsent(p for group in self._optimizer.param_groups for p in group["params"])

    @override
    def state_dict(self) -> dict[str, Any]:
        """The full state, from all ranks where the strategy shards it."""
        return self._strategy.get_optimizer_state(self._optimizer)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full state."""
        self._strategy.load_optimizer_state(self._optimizer, state_dict)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the user's optimizer."""
        self._optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if "_optimizer" not in self.__dict__:
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}` before its constructor ran.")
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._optimizer, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._optimizer)})

    def __repr__(self) -> str:
        return repr(self._optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        return copy.deepcopy(self._optimizer, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._optimizer,)


def _itself(optimizer: Optimizer) -> Optimizer:
    return optimizer
