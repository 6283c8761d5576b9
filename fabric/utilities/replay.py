# SPDX-License-Identifier: Apache-2.0
"""Doing for real what was recorded on the meta device, with few of its tensors in memory at a time."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from fabric.utilities.recording import Recording, Step, View, mapped, tensors_in, view_of


class Home(Protocol):
    """Where the values of a parameter or buffer stay."""

    @property
    def dtype(self) -> torch.dtype:
        """In which they are kept there."""

    def keep(self, whole: Tensor) -> None:
        """Put them there."""

    def whole(self) -> Tensor:
        """Take all of them back, contiguous."""


def replay(
    recordings: Iterable[Recording],
    homes: Iterable[tuple[View, Home]],
    device: torch.device,
    *,
    constant: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    around: Callable[[Recording], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Do all that was recorded, in its order, so that random numbers are those of the original program.

    A tensor is in memory from its first use on. One with a home goes there whenever the next step does not use it.

    Args:
        recordings: What to do.
        homes: Where the values stay that are wanted; others are dropped after their last use.
        device: Where it is done.
        constant: Applied to the tensors that had values already at the time of the recording.
        around: Surrounds each recording.
    """
    recordings = list(recordings)
    run = _Replay(recordings, homes, device, constant)
    for recording in recordings:
        with around(recording), torch.no_grad():
            for step, following in zip_longest(recording.steps, recording.steps[1:]):
                run.do(step)
                run.release(following.uses if following is not None else frozenset())


class _Replay:
    def __init__(self, recordings: list[Recording], homes: Any, device: torch.device, constant: Any) -> None:
        self._device = device
        self._constant = constant
        self._storages = {key: storage for recording in recordings for key, storage in recording.storages.items()}
        self._left = Counter(key for recording in recordings for step in recording.steps for key in step.uses)
        self._real: dict[int, UntypedStorage] = {}
        self._away: set[int] = set()  # the storages whose values are at home only
        self._homes: dict[int, list[tuple[View, Home]]] = {}
        for view, home in homes:
            self._homes.setdefault(view.key, []).append((view, home))

    def do(self, step: Step) -> None:
        self._bring(step)
        args, kwargs = mapped((step.args, step.kwargs), self._tensor, self._device)
        result = step.call(*args, **kwargs)
        for view, real in zip(step.results, tensors_in(result), strict=False):
            if view is not None:
                self._bind(view, real)
        self._left.subtract(step.uses)

    def _bring(self, step: Step) -> None:
        """Take back what the step needs of the values that are at home."""
        for key in step.uses & self._away:
            self._away.discard(key)
            [(view, home)] = self._homes[key]
            if view != step.overwrites:
                self._real[key] = home.whole().untyped_storage()

    def _tensor(self, value: Tensor | View) -> Tensor:
        """What stands for a tensor of the recording."""
        return self._at(value) if isinstance(value, View) else self._constant(value)

    def _at(self, view: View) -> Tensor:
        if view.key not in self._real:
            self._real[view.key] = UntypedStorage(self._storages[view.key].nbytes(), device=self._device)
        empty = torch.empty(0, dtype=view.dtype, device=self._device)
        return empty.set_(self._real[view.key], view.offset, view.size, view.stride)

    def _bind(self, view: View, result: Tensor) -> None:
        """Take what a step has made as the storage of what it made on the meta device."""
        if view.key in self._real:
            return
        if view_of(result).layout == view.layout:
            self._real[view.key] = result.untyped_storage()
        else:
            self._at(view).copy_(result)

    def release(self, next_uses: frozenset[int]) -> None:
        """Free what the next step does not need."""
        for key in self._real.keys() - next_uses:
            done = not self._left[key]
            if done or self._can_leave(key):
                for view, home in self._homes.get(key, ()):
                    home.keep(self._at(view))
                del self._real[key]
                if not done:
                    self._away.add(key)

    def _can_leave(self, key: int) -> bool:
        homes = self._homes.get(key, [])
        return all(view.fills(self._storages[key]) and view.dtype == home.dtype for view, home in homes) and (
            len(homes) == 1
        )
