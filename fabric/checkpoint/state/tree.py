# SPDX-License-Identifier: Apache-2.0
"""What a user's `state` consists of."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from fabric.utilities.types import Stateful


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Whether a value has a state of its own: a module, an optimizer, a loader, a scheduler, one of the user's."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def holds_stateful(value: Any) -> bool:
    """Whether anything in a value has a state of its own."""
    if is_stateful(value):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_stateful, value.values()))
    return type(value) in (list, tuple) and any(map(holds_stateful, value))


def at(where: str, key: Any) -> str:
    """The place of an item: `state["nets"][0]`."""
    return f'{where}["{key}"]' if isinstance(key, str) else f"{where}[{key!r}]"
