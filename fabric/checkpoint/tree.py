# SPDX-License-Identifier: Apache-2.0
"""What a user's `state` consists of."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from fabric.utilities.parameter_names import plain_name
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


def with_plain_names(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """A module's state dictionary under the plain names of its parameters."""
    if all(plain_name(name) == name for name in state_dict):
        return state_dict
    return rebuilt(state_dict, {plain_name(name): value for name, value in state_dict.items()}, plain_name)


def rebuilt(
    state_dict: Mapping[str, Any], entries: Mapping[str, Any], rename: Callable[[str], str] = str
) -> Mapping[str, Any]:
    """Other entries for a state dictionary, with the versions of modules that PyTorch keeps as an attribute beside it.

    Args:
        state_dict: The old one.
        entries: The new entries.
        rename: From an old name of a module to the new one.
    """
    result = OrderedDict(entries)
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        result._metadata = OrderedDict((rename(name), value) for name, value in versions.items())  # type: ignore[attr-defined]
    return result
