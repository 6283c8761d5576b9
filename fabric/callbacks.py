# SPDX-License-Identifier: Apache-2.0
"""The user's callbacks: calling their hooks, and keeping their state."""

from collections.abc import Iterable, Mapping
from typing import Any

from fabric.checkpoint import is_stateful
from fabric.utilities.rank_zero import rank_zero_warn


class Callbacks(list[Any]):
    """Objects with methods that the loop calls by name."""

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method `hook_name` of each that has it, in their order.

        Raises:
            TypeError: If one has something else under that name.
        """
        for callback in self:
            hook = getattr(callback, hook_name, None)
            if hook is None:
                continue
            if not callable(hook):
                raise TypeError(
                    f"`fabric.call({hook_name!r})`: `{type(callback).__name__}.{hook_name}` is a"
                    f" `{type(hook).__name__}`, not a method. Make it one, or call another hook."
                )
            hook(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The state of those that have one, by the name of their class."""
        return {name: callback.state_dict() for name, callback in self._stateful()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore those that are both here and in `state_dict`; rank 0 warns of the others."""
        callbacks = dict(self._stateful())
        if callbacks.keys() != state_dict.keys():
            rank_zero_warn(
                f"The checkpoint holds the state of the callbacks {sorted(state_dict) or 'none'}, and this run has"
                f" {sorted(callbacks) or 'none'}. Only those in both are restored."
            )
        for name, callback in callbacks.items():
            if name in state_dict:
                callback.load_state_dict(state_dict[name])

    def _stateful(self) -> Iterable[tuple[str, Any]]:
        """Further ones of the same class are numbered."""
        seen: list[type] = []
        for callback in filter(is_stateful, self):
            kind = type(callback)
            yield f"{kind.__name__}-{seen.count(kind)}" if kind in seen else kind.__name__, callback
            seen.append(kind)
