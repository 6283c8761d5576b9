# SPDX-License-Identifier: Apache-2.0
"""Where a loader stands: epochs that advance by themselves, and resuming in the middle of one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fabric.data.agreement import Agreed
from fabric.data.place import Place
from fabric.data.prefetch import prefetched
from fabric.data.share import Share
from fabric.data.source import Reading, Source, Stated

Move = Callable[[Any], Any]


class Moving(NamedTuple):
    """How batches get to the device.

    Args:
        move: Called with each batch; what it returns is yielded. None hands the batches through.
        prefetch: So many batches are moved before they are asked for.
        device: Where they are moved to.
    """

    move: Move | None = None
    prefetch: int = 0
    device: torch.device = torch.device("cpu")


class Epochs:
    """Starts the iterations of one loader and knows where they are.

    Each iteration takes the next epoch, which the holders are told when the one before is over (also by `break`). If
    one of them shows another one by then, the user has chosen it, and it is that of all of them.

    Args:
        source: What is read.
        reading: How the ranks read it.
        moving: How batches get to the device.
    """

    def __init__(self, source: Source, reading: Reading, moving: Moving) -> None:
        self._source = source
        self._reading = reading
        self._moving = moving
        self._ahead = source.uneven or (moving.move is not None and moving.prefetch > 0)
        self._holders = source.epoch_holders
        self._epoch = 0
        self._current: Place | None = None
        self._latest: Place | None = None  # the same, also after `set_epoch`
        self._resume: Place | None = None
        self._votes: Sequence[Callable[[], bool]] = ()  # of the latest iteration

    def start(self) -> Iterator[Any]:
        """Start the next iteration."""
        if self._current is not None:
            self._leave(self._current)
        epoch = self._next_epoch()
        if epoch != self._epoch:
            self._tell(epoch)
        place = self._resume if self._resume is not None and self._resume.epoch == epoch else Place(epoch)
        self._resume = None
        self._current = self._latest = place
        place.begun = place.position
        return _Iteration(self._batches_from(place), place, self._source.stride, self._leave)

    def _batches_from(self, place: Place) -> Iterator[Any]:
        source, moving = self._source, self._moving
        start = partial(source.start, place, ahead=self._ahead)
        batches = _error_as_batch(start) if source.uneven else start()
        stated = source.yields_states(self._ahead)
        move = moving.move if moving.move is None or not stated else partial(_move_stated, moving.move)
        if move is not None:
            if moving.prefetch:
                batches = prefetched(batches, move, moving.prefetch, moving.device)
            else:
                batches = map(move, batches)
        if source.uneven:
            batches = self._agree(batches, place, move)
        return map(partial(_take_state, place), batches) if stated else batches

    def _agree(self, batches: Iterator[Any], place: Place, move: Move | None) -> Iterator[Any]:
        for vote in self._votes:  # that a `break` left behind
            vote()
        source = self._source

        def one_more() -> Any:
            try:
                batch = source.one_more(place)
            except StopIteration:
                raise RuntimeError(
                    f"This rank goes on in epoch {place.epoch} without a batch left to repeat, and its data set yields"
                    " none when it begins anew. Save at the end of an epoch, or use"
                    " `setup_dataloaders(..., uneven='stop')`."
                ) from None
            return batch if move is None else move(batch)

        decide, stop = self._reading.ranks.decide, self._reading.uneven == "stop"
        agreed = Agreed(batches, place, decide=decide, stop=stop, one_more=one_more)
        self._votes = agreed.votes
        return agreed

    def _next_epoch(self) -> int:
        """That which the user has chosen, else the one that the holders were told last."""
        shown = (getattr(holder, "epoch", None) for holder in self._holders)
        return next((epoch for epoch in shown if isinstance(epoch, int) and epoch != self._epoch), self._epoch)

    def _tell(self, epoch: int) -> None:
        for follower in self._source.followers:
            if getattr(follower, "epoch", self._epoch) == self._epoch:
                follower.set_epoch(epoch)
        for holder in self._holders:
            holder.set_epoch(epoch)
        self._epoch = epoch

    def _leave(self, place: Place) -> None:
        """Advance the epoch, unless the user has chosen another one meanwhile."""
        if place.left:
            return
        place.left = True
        if self._next_epoch() == place.epoch:
            self._tell(place.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._tell(epoch)
        if self._current is not None and self._current.left:
            self._current = None

    @property
    def share(self) -> Share | None:
        """The share of the batch that was yielded last; None before the first."""
        place = self._latest
        return None if place is None or place.position == place.begun else self._source.share(place)

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and position, as `state_dict` gives them."""
        place = self._place()
        return place.epoch, place.position

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, counted in batches that were *yielded*."""
        place = self._place()
        numbers: dict[str, Any] = {
            "epoch": place.epoch,
            "position": place.position,
            "consumed": place.consumed,
            "seed": self._source.seed,
        }
        if self._source.layout is not None:
            numbers["layout"] = self._source.layout
        if not self._source.has_state:
            return numbers
        ranks = self._reading.ranks
        gathered = ranks.gather((ranks.rank, self._state_of(place)))
        return {**numbers, "streams": [state for _, state in sorted(dict(gathered).items())]}

    def _place(self) -> Place:
        current, following = self._current, self._next_epoch()
        if current is not None and not current.exhausted and (not current.left or following == current.epoch + 1):
            return current
        if self._resume is not None and self._resume.epoch == following:
            return self._resume
        return Place(following)

    def _state_of(self, place: Place) -> Any:
        """The state of what is read at a place."""
        latest = self._latest
        if latest is None or place.resume is not None:
            yielded = place is latest and place.position > place.begun
            return self._state_after(place) if yielded else place.resume
        if place is latest:
            return self._state_after(place) if place.position > place.begun else None
        ended = self._source.state_at_end() if latest.exhausted else None
        return ended and {**ended, "ended": True}

    def _state_after(self, place: Place) -> Any:
        """The state after the batch that was yielded last, in the latest iteration."""
        return place.stream if self._source.yields_states(self._ahead) else self._source.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned: the next iteration starts there."""
        source = self._source
        place = Place(int(state["epoch"]), int(state["position"]), int(state["consumed"]))
        place.resume = self._own_stream(state)
        source.resume_counts(place)
        source.validate_resumable(place)
        if state["position"] and place.resume is None:
            self._validate_layout(state)
        source.adopt_seed(state["seed"])
        self._current = None
        self.set_epoch(place.epoch)
        self._resume = place
        self._latest = None

    def _validate_layout(self, state: Mapping[str, Any]) -> None:
        """Counting batches leads to the place only where they are made as they were."""
        here = self._source.layout
        saved = state.get("layout", here)
        if saved != here:
            raise RuntimeError(
                f"The loader was saved after {state['position']} batches of epoch {state['epoch']} with `{saved}`, and"
                f" now it has `{here}`: its batches are counted, and go on only with the same. Save at the end of an"
                " epoch to change them."
            )

    def _own_stream(self, state: Mapping[str, Any]) -> Any:
        """This rank's part of a state, where what is read has one."""
        streams, ranks = state.get("streams"), self._reading.ranks
        if streams is None or not self._source.has_state:
            return None
        if len(streams) != ranks.num_replicas and state["position"]:
            raise RuntimeError(
                f"The loader was saved in the middle of epoch {state['epoch']} by {len(streams)} ranks, and"
                f" {ranks.num_replicas} load it: a stream goes on only with as many as before. Save at the end of an"
                " epoch to change the number of ranks."
            )
        own = streams[ranks.rank] if len(streams) == ranks.num_replicas else None
        return self._source.validate_state(own)


def _error_as_batch(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """An iterator that fails with its first batch, so that the ranks can tell each other, if it can't be made."""
    try:
        return start()
    except Exception as error:
        return map(_raise, [error])


def _raise(error: Exception) -> Any:
    raise error


def _move_stated(move: Move, item: Stated) -> Stated:
    return Stated(move(item.batch), item.state)


def _take_state(place: Place, item: Stated) -> Any:
    place.stream = item.state
    return item.batch


class _Iteration(Iterator[Any]):
    """Yields the batches of one epoch and keeps the place. It holds on to no batch, so that the loop can free it."""

    __slots__ = ("_batches", "_leave", "_place", "_stride")

    def __init__(self, batches: Iterator[Any], place: Place, stride: int, leave: Callable[[Place], None]) -> None:
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
