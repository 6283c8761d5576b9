# SPDX-License-Identifier: Apache-2.0
"""Reading anything that can be iterated over and is no `DataLoader`."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from typing_extensions import override

from fabric.data.place import Place
from fabric.data.share import Share
from fabric.data.source import Source, Stated, restarted_if_over
from fabric.data.streams import is_stateful
from fabric.utilities.seed import IsolatedRandom, derive_seed


class IterableSource(Source):
    """The batches of an object of the user's, on each rank what that rank's object yields.

    Args:
        batches: Any iterable. One that has `state_dict` and `load_state_dict` goes on by itself.
        replay: Whether one that has not goes on by yielding the first batches once more.
    """

    def __init__(self, batches: Iterable[Any], *, replay: bool) -> None:
        self._batches = batches
        self._replays = replay
        self.has_state = is_stateful(batches)
        self.epoch_holders = [batches] if callable(getattr(batches, "set_epoch", None)) else []

    @override
    def start(self, place: Place, *, ahead: bool) -> Iterator[Any]:
        if place.resume is not None:
            self._batches.load_state_dict(place.resume["loader"])  # type: ignore[attr-defined]
            ended = place.resume.get("ended")
            batches = restarted_if_over(lambda: iter(self._batches)) if ended else iter(self._batches)
        else:
            batches = self._from_the_beginning(place)
        if self.has_state and ahead:
            return map(self._with_state, batches)
        return batches

    def _with_state(self, batch: Any) -> Stated:
        return Stated(batch, self.state())

    def _from_the_beginning(self, place: Place) -> Iterator[Any]:
        if place.position == 0:
            return iter(self._batches)
        with IsolatedRandom(derive_seed(place.epoch)):
            batches = iter(self._batches)
            for _ in islice(batches, place.position):
                pass
        return batches

    @override
    def state(self) -> Any:
        return {"loader": self._batches.state_dict()} if self.has_state else None  # type: ignore[attr-defined]

    @override
    def state_at_end(self) -> Any:
        return self.state()

    @override
    def share(self, place: Place) -> Share:
        return Share(None, interleaved=False)

    @override
    def validate_resumable(self, place: Place) -> None:
        if place.position and place.resume is None and not self._replays:
            kind = type(self._batches).__name__
            raise RuntimeError(
                f"The loader was saved after {place.position} batches of epoch {place.epoch}, and it is a `{kind}`"
                " without a place to go to. Give it `state_dict` and `load_state_dict`, save at the end of an epoch,"
                " or load the first batches once more with `fabric.setup_dataloaders(..., replay=True)`."
            )
