# SPDX-License-Identifier: Apache-2.0
"""Ranks whose data ends at different batches take the same number of steps."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from fabric.data.place import Place

_NONE = object()
_Vote = Callable[[], bool]


class Agreed(Iterator[Any]):
    """The batches of a rank, as many as on every other rank.

    [Note: one batch ahead] When a batch is handed over, the next one has been fetched and the ranks have begun to agree
    whether all of them have one; the answer is awaited with the next call, so that it travels during the step. While
    all have one, that is a single boolean a batch. From the first rank that has none on, two are needed: whether any
    has one, and whether none has failed.

    Args:
        batches: This rank's own.
        place: Is told whether a batch is a repetition.
        decide: Starts an agreement of all ranks about a boolean.
        stop: Whether all ranks end with the first one; otherwise one that has ended repeats its last batch.
        one_more: Makes a batch to be repeated, on a rank that goes on where it has no batch left.

    Attributes:
        votes: What the ranks have begun to agree on; to be awaited where this iterator is left behind.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        place: Place,
        *,
        decide: Callable[..., _Vote],
        stop: bool,
        one_more: Callable[[], Any],
    ) -> None:
        self._batches: Iterator[Any] | None = batches
        self._place = place
        self._decide = decide
        self._stop = stop
        self._one_more = one_more
        self._next: Any = _NONE
        self._last: Any = _NONE  # what is repeated
        self._error: Exception | None = None
        self.votes: list[_Vote] = []
        self._all_have = True
        self._started = False

    def __next__(self) -> Any:
        if not self._started:
            self._started = True
            self._fetch()
        if not self._goes_on():
            self._batches, self._last = None, _NONE
            self.votes.clear()
            raise StopIteration
        padded = self._next is _NONE
        batch = self._repetition() if padded else self._next
        self._next = _NONE
        self._fetch()
        if self._next is _NONE and self._last is _NONE and not self._stop:
            self._last = _copied(batch)  # as it is now: the user may change it
        self._place.padded = padded
        return batch

    def _fetch(self) -> None:
        """Get the next batch and tell the others whether there is one."""
        try:
            if self._batches is not None:
                self._next = next(self._batches)
        except StopIteration:
            self._batches = None
        except Exception as error:
            self._batches, self._error = None, error
        has, failed = self._next is not _NONE, self._error is not None
        if self._all_have:
            self.votes[:] = [self._decide(has, all=True)]
        else:
            self.votes[:] = [self._decide(has, all=False), self._decide(not failed, all=True)]

    def _goes_on(self) -> bool:
        if not self.votes:
            return False
        if self._all_have:
            self._all_have = self.votes[0]()
            if self._all_have:
                return True
            self._ask_for_more()
        any_has, none_failed = (vote() for vote in self.votes)
        if not none_failed:
            self._raise()
        return any_has and not self._stop

    def _ask_for_more(self) -> None:
        has, first = self._next is not _NONE, self._place.position == 0
        self.votes[:] = [self._decide(has, all=False), self._decide(self._error is None, all=True)]
        if first and not self._stop and self.votes[0]() and self.votes[1]():
            self._error = RuntimeError(
                "`fabric.setup_dataloaders(...)`: some ranks have no data at all in this epoch, and nothing to repeat"
                " while the others have some. Give the data set at least one sample for each rank, or end all ranks"
                " together with `setup_dataloaders(..., uneven='stop')`."
            )
            self._raise()

    def _raise(self) -> None:
        self._batches, self._error, error = None, None, self._error
        self.votes.clear()
        if error is not None:
            raise error
        raise RuntimeError("The loader of another rank failed to make its next batch; its own error says why.")

    def _repetition(self) -> Any:
        if self._last is _NONE:
            self._last = self._one_more()
        return _copied(self._last)


def _copied(batch: Any) -> Any:
    try:
        return deepcopy(batch)
    except Exception:  # what can't be copied is repeated as it is; raising here would leave the other ranks waiting
        return batch
