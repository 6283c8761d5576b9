# SPDX-License-Identifier: Apache-2.0
"""Small questions about data loaders, and a dictionary with attributes."""

import os
from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def suggested_max_num_workers(local_world_size: int) -> int:
    """A number of workers per data loader that leaves one core of each rank's share to the rank itself.

    Args:
        local_world_size: Number of ranks on this machine.

    Raises:
        ValueError: If that is less than 1.
    """
    if local_world_size < 1:
        raise ValueError(
            f"`suggested_max_num_workers({local_world_size!r})` takes the number of ranks on this machine, at least 1."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)


def has_iterable_dataset(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads a stream (an `IterableDataset`), which has no indices to sample."""
    return isinstance(loader.dataset, IterableDataset)


def has_len(obj: object) -> bool:
    """Whether `len(obj)` works. A loader over a stream may have `__len__` and raise all the same."""
    if not isinstance(obj, Sized):
        return False
    try:
        len(obj)
    except (TypeError, NotImplementedError):
        return False
    return True


class AttributeDict(dict[str, Any]):
    """A dictionary whose items are attributes too.

    Example:
        >>> state = AttributeDict(step=1)
        >>> state.step += 1
        >>> state
        AttributeDict({'step': 2})
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"`{type(self).__name__}` has no key `{name}`.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"`{type(self).__name__}` has no key `{name}`.") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().__repr__()})"
