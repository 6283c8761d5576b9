# SPDX-License-Identifier: Apache-2.0
"""The plain names of parameters, without the segments that wrappers put into them."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module

WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """`blocks.0._orig_mod.weight` -> `blocks.0.weight`."""
    if "_" not in name:
        return name
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


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


def under_own_names(
    state_dict: Mapping[str, Any], module: Module, own: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """A state dictionary under the module's own names, which wrappers such as `torch.compile` make longer.

    Entries that the module has not keep their names.

    Args:
        state_dict: Under plain or longer names.
        module: The module.
        own: Its own state dictionary, if the caller has it.
    """
    expected = module.state_dict() if own is None else own
    if state_dict.keys() == expected.keys():
        return state_dict
    actual = {plain_name(name): name for name in expected}
    modules = {plain_name(name): name for name, _ in module.named_modules()}
    entries = {actual.get(plain_name(key), key): value for key, value in state_dict.items()}
    return rebuilt(state_dict, entries, lambda name: modules.get(plain_name(name), name))


def with_ties(state_dict: Mapping[str, Any], module: Module, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dictionary in which a parameter with several names is there under each, if it is under one.

    Formats that hold no tensor twice keep one of the names.

    Args:
        state_dict: Under the names of `own`.
        module: The module.
        own: Its own state dictionary.
    """
    missing = own.keys() - state_dict.keys()
    if not missing:
        return state_dict
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    present = {id(tensor): state_dict[name] for name, tensor in tensors if name in state_dict}
    added = {name: present[id(tensor)] for name, tensor in tensors if name in missing and id(tensor) in present}
    return rebuilt(state_dict, {**state_dict, **added}) if added else state_dict
