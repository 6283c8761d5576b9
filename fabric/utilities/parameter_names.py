# SPDX-License-Identifier: Apache-2.0
"""The plain names of parameters, without the segments that wrappers put into them."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """`blocks.0._orig_mod.weight` -> `blocks.0.weight`."""
    if "_" not in name:
        return name
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


def rename_to_match(state_dict: Mapping[str, T], names: Iterable[str]) -> dict[str, Any]:
    """The entries of `state_dict` under those of `names` that have the same plain name; others keep theirs."""
    actual = {plain_name(name): name for name in names}
    return {actual.get(plain_name(key), key): value for key, value in state_dict.items()}
