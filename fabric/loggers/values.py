# SPDX-License-Identifier: Apache-2.0
"""What programs log, in the forms that files and trackers take."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor


def as_number(name: str, value: Any) -> Any:
    """The Python number in a tensor; anything else as it is.

    Raises:
        ValueError: If it is a tensor of more or less than one element; `name` is named.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(
            f"`log_metrics` got a tensor of shape {tuple(value.shape)} for `{name}`, which is not one number."
            f" Reduce it first, for example with `.mean()`."
        )
    return value.item()


def as_numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers by name, each name behind `prefix-`.

    Example:
        >>> as_numbers({"loss": 0.5}, prefix="train")
        {'train-loss': 0.5}
    """
    return {prefixed(name, prefix): as_number(name, value) for name, value in metrics.items()}


def prefixed(name: str, prefix: str) -> str:
    """The name behind `prefix-`, where there is a prefix."""
    return f"{prefix}-{name}" if prefix else name


def as_dict(params: Any) -> dict[str, Any]:
    """Hyperparameters as a dictionary: of a mapping, an `argparse.Namespace` or a dataclass instance."""
    if isinstance(params, Namespace):
        return vars(params)
    if is_dataclass(params) and not isinstance(params, type):
        return asdict(params)
    return dict(params)


def as_flat_dict(params: Any) -> dict[str, bool | int | float | str]:
    """Hyperparameters without nesting, in the types that every tracker takes; what is none of them as its `str`.

    Example:
        >>> as_flat_dict({"optimizer": {"lr": 0.1, "betas": (0.9, 0.95)}, "seed": None})
        {'optimizer/lr': 0.1, 'optimizer/betas': '(0.9, 0.95)', 'seed': 'None'}
    """
    flat: dict[str, bool | int | float | str] = {}
    for name, value in as_dict(params).items():
        if isinstance(value, Mapping | Namespace) or (is_dataclass(value) and not isinstance(value, type)):
            flat |= {f"{name}/{inner}": number for inner, number in as_flat_dict(value).items()}
        elif isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
            flat[str(name)] = value.item()
        else:
            flat[str(name)] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
