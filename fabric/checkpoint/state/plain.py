# SPDX-License-Identifier: Apache-2.0
"""Whether a value can be loaded again by the safe default."""

import io
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from fabric.checkpoint.state.shards import is_sharded
from fabric.checkpoint.state.tree import at

# Exact types, as pickles name them. A test loads one of each.
_VALUES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device, torch.layout}
    | {torch.Tensor, torch.nn.Parameter}
)
_CONTAINERS = frozenset({dict, OrderedDict, Counter, list, tuple, set})


def validate_loadable(value: Any, where: str) -> None:
    """Raise where `weights_only=True`, the default of loading, would refuse a value, or anything inside it.

    Args:
        value: What is about to be saved.
        where: Its name for the error.
    """
    kind = type(value)
    if kind in _VALUES or is_sharded(value):  # what is written of a sharded tensor is plain
        return
    if kind not in _CONTAINERS:
        if not _survives(value):
            raise _refused(value, where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            validate_loadable(key, f"{where} (the key {key!r})")
            validate_loadable(item, at(where, key))
    else:
        for index, item in enumerate(value):
            validate_loadable(item, at(where, index))


def _survives(value: Any) -> bool:
    """The rare types: `torch.serialization.add_safe_globals` may allow them, so ask PyTorch itself."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:
        return False
    return True


def _refused(value: Any, where: str) -> TypeError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    hint = " (`.item()` of a NumPy number, `torch.from_numpy` of an array)" if kind.__module__ == "numpy" else ""
    return TypeError(
        f"`fabric.save`: `{where}` is a `{name}`, which `fabric.load` refuses by default, since unpickling it could"
        f" run code. Save plain values in its place{hint}, give it `state_dict` and `load_state_dict`, or allow it in"
        f" both programs with `torch.serialization.add_safe_globals([{kind.__qualname__}])`."
    )
