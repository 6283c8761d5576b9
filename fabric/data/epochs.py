# SPDX-License-Identifier: Apache-2.0
"""Where a loader stands: epochs that advance by themselves, and resuming in the middle of one."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from fabric.data.sharding import Sharding
from fabric.utilities.data import has_iterable_dataset
from fabric.utilities.seed import IsolatedRandom, derive_seed


@dataclass
class _Place:
    """A place in the data: `position` batches of this rank (`consumed` items of the global order) into an epoch."""

    epoch: int
    position: int
    consumed: int
    exhausted: bool = False
    left: bool = False  # the epoch has advanced: its iterator is gone, or another one has started


class Epochs:
    """Starts the iterations of one loader and knows where they are.

    An iteration takes the epoch that the samplers show; when it is over (also by `break`), they are set to the next.
    So a `set_epoch` of the user's in between wins.

    Args:
        loader: A loader, from `shard_dataloader` or as the user made it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._sharding = Sharding.of(loader)
        self._holders = _epoch_holders(loader)
        self._epoch = 0
        self._current: _Place | None = None
        self._resume: _Place | None = None

    def start(self, move: Callable[[Any], Any] | None) -> Iterator[Any]:
        """Start the next iteration.

        Args:
            move: Called with each batch; what it returns is yielded.
        """
        if self._current is not None:
            self._leave(self._current)
        epoch = self._next_epoch()
        place = self._resume if self._resume is not None and self._resume.epoch == epoch else _Place(epoch, 0, 0)
        self._resume = None
        self._current = place
        batches = self._batches_from(place)
        leave = self._leave
        return _Iteration(batches if move is None else map(move, batches), place, self._stride, leave)

    @property
    def _stride(self) -> int:
        return 1 if self._sharding is None else self._sharding.stride

    def _batches_from(self, place: _Place) -> Iterator[Any]:
        if self._sharding is not None:
            sampler = self._sharding.sampler
            self._sharding.generator.manual_seed(derive_seed(sampler.seed, place.epoch, sampler.rank))
        if place.position == 0 and place.consumed == 0:
            return iter(self._loader)
        if type(self._loader).__iter__ is not DataLoader.__iter__:
            return self._replay(place)
        if self._sharding is not None:
            self._sharding.sampler.skip(place.consumed)
            try:
                return iter(self._loader)
            finally:
                self._sharding.sampler.skip(0)
        with IsolatedRandom(derive_seed(place.epoch, place.position)):  # PyTorch draws a seed for its workers
            return iter(_without_first(self._loader, place.position))

    def _replay(self, place: _Place) -> Iterator[Any]:
        """A loader with an `__iter__` of its own alone knows which batch comes when: let it run up to the place."""
        with IsolatedRandom(derive_seed(place.epoch)):
            batches = iter(self._loader)
            for _ in islice(batches, place.position):
                pass
        return batches

    def _next_epoch(self) -> int:
        shown = (getattr(holder, "epoch", None) for holder in self._holders)
        return next((epoch for epoch in shown if isinstance(epoch, int)), self._epoch)

    def _leave(self, place: _Place) -> None:
        """Advance the epoch, unless the user has chosen another one meanwhile."""
        if place.left:
            return
        place.left = True
        for holder in self._holders:
            if getattr(holder, "epoch", place.epoch) == place.epoch:
                holder.set_epoch(place.epoch + 1)
        if self._epoch == place.epoch or self._holders:
            self._epoch = place.epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        for holder in self._holders:
            holder.set_epoch(epoch)
        self._epoch = epoch
        if self._current is not None and self._current.left:
            self._current = None

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, counted in batches that were *yielded*."""
        place = self._place()
        seed = None if self._sharding is None else self._sharding.sampler.seed
        return {"epoch": place.epoch, "position": place.position, "consumed": place.consumed, "seed": seed}

    def _place(self) -> _Place:
        current, following = self._current, self._next_epoch()
        if current is not None and not current.exhausted and (not current.left or following == current.epoch + 1):
            return current
        if self._resume is not None and self._resume.epoch == following:
            return self._resume
        return _Place(following, 0, 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned: the next iteration starts there."""
        place = _Place(int(state["epoch"]), int(state["position"]), int(state["consumed"]))
        if self._sharding is not None:
            # Counted in samples: another number of ranks or another batch size goes on with the unseen ones.
            place.position = place.consumed // self._sharding.stride
            self._sharding.sampler.seed = state["seed"] if state["seed"] is not None else self._sharding.sampler.seed
        elif place.position:
            self._validate_resumable(place)
        self._current = None
        self.set_epoch(place.epoch)
        self._resume = place

    def _validate_resumable(self, place: _Place) -> None:
        if has_iterable_dataset(self._loader):
            raise RuntimeError(
                f"The loader was saved after {place.position} batches of epoch {place.epoch}, and its data set is an"
                f" `IterableDataset` (`{type(self._loader.dataset).__name__}`), which has no position to go to."
                " Save at the end of an epoch, or leave the loader out of the state and skip the batches yourself."
            )
        samplers = (self._loader.sampler, getattr(self._loader.batch_sampler, "sampler", None))
        if not self._holders and not any(type(sampler) is SequentialSampler for sampler in samplers):
            raise RuntimeError(
                f"The loader was saved after {place.position} batches of epoch {place.epoch}, and it was set up with"
                f" `use_distributed_sampler=False`: its order (by `{type(self._loader.sampler).__name__}`) can't"
                " be drawn again. Give its sampler a `set_epoch`, or let `setup_dataloaders` shard it."
            )


class _Iteration(Iterator[Any]):
    """Yields the batches of one epoch and keeps the place. It holds on to no batch, so that the loop can free it."""

    __slots__ = ("_batches", "_leave", "_place", "_stride")

    def __init__(self, batches: Iterator[Any], place: _Place, stride: int, leave: Callable[[_Place], None]) -> None:
        self._batches = batches
        self._place = place
        self._stride = stride
        self._leave = leave

    def __next__(self) -> Any:
        place = self._place
        try:
            batch = next(self._batches)
        except StopIteration:
            place.exhausted = True
            self._leave(place)
            raise
        place.position += 1
        place.consumed += self._stride
        return batch

    def __del__(self) -> None:
        self._leave(self._place)


def _epoch_holders(loader: DataLoader[Any]) -> list[Any]:
    """What has to be told the epoch: the samplers, and a loader or data set that asks for it."""
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    candidates = (getattr(batch_sampler, "sampler", None), sampler, batch_sampler, loader, loader.dataset)
    unique = {id(candidate): candidate for candidate in candidates}.values()
    return [candidate for candidate in unique if callable(getattr(candidate, "set_epoch", None))]


def _without_first(loader: DataLoader[Any], position: int) -> DataLoader[Any]:
    """A copy of a loader for one iteration, which leaves out the first batches without loading them."""
    shortened = copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(shortened).update({name: _Rest(getattr(loader, name), position), "_iterator": None})
    return shortened


@dataclass(frozen=True)
class _Rest:
    sampler: Any
    position: int

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.position, None)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.position)
