# SPDX-License-Identifier: Apache-2.0
"""What a set-up loader reads from: one kind for each kind of data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

from fabric.data.place import Place
from fabric.data.share import Share


def _decided(decision: bool, all: bool = True) -> Callable[[], bool]:
    """One rank agrees with itself."""
    return lambda: decision


def _alone(state: Any) -> list[Any]:
    return [state]


class Ranks(NamedTuple):
    """The ranks that read the data, and how they talk about it.

    Args:
        num_replicas: Number of data-parallel ranks.
        rank: This one.
        decide: Starts an agreement about a boolean; the function that it returns waits for the answer.
        gather: The objects of all ranks.
    """

    num_replicas: int = 1
    rank: int = 0
    decide: Callable[..., Callable[[], bool]] = _decided
    gather: Callable[[Any], list[Any]] = _alone


class Reading(NamedTuple):
    """How the user wants a loader to be read.

    Args:
        ranks: The ranks that share the data.
        shard: Whether to give each rank its own part of a stream.
        uneven: What ranks do whose stream ends before another's: `pad` repeats a batch, `stop` ends all of them.
        replay: Whether to go on, where data has no position to go to, by loading the batches once more.
        seed: Equal on all ranks.
    """

    ranks: Ranks = Ranks()
    shard: bool = True
    uneven: Literal["pad", "stop"] = "pad"
    replay: bool = False
    seed: int = 0


class Stated(NamedTuple):
    """A batch, and the state of what it was read from after it."""

    batch: Any
    state: Any


def restarted_if_over(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """An iterator from a state that was saved at the end of an epoch.

    Some data ends at once when it goes on from there, as it did when it was saved, and begins the next epoch when it is
    iterated over once more; other data, which has no end, begins the next epoch right away.
    """
    batches = start()
    first = list(islice(batches, 1))
    return chain(first, batches) if first else start()


class Source(ABC):
    """Makes the iterators of a loader.

    Attributes:
        stride: Items of the global order that all ranks together take for one batch each.
        epoch_holders: What has to be told the epoch, each with `set_epoch`; the user may choose one through each.
        followers: What is told the epoch too, but may be another loader's as well, so that it says nothing about ours.
        seed: What the order is drawn from; None where it is not drawn here.
        uneven: Whether one rank may have data when another has none any more.
        has_state: Whether what is read has a state that a place needs besides its numbers.
        layout: What its batches depend on, where a place can't be recounted for any other; else None.
    """

    stride: int = 1
    epoch_holders: list[Any]
    followers: Sequence[Any] = ()
    seed: Any = None
    uneven: bool = False
    has_state: bool = False
    layout: dict[str, int | None] | None = None

    @abstractmethod
    def start(self, place: Place, *, ahead: bool) -> Iterator[Any]:
        """An iterator from a place on.

        Args:
            place: Where to start.
            ahead: Whether batches will be asked for before they are yielded to the user, so that where `has_state`
                is True each one is to be `Stated`.
        """

    @abstractmethod
    def share(self, place: Place) -> Share:
        """The share of the batch that was yielded last."""

    def yields_states(self, ahead: bool) -> bool:
        """Whether `start(..., ahead=ahead)` yields `Stated` batches."""
        return self.has_state and ahead

    def state(self) -> Any:
        """The state of what is read, now."""
        return None

    def state_at_end(self) -> Any:
        """The state of what is read when an epoch is over, where the next one depends on it."""
        return None

    def length(self) -> int | None:
        """Batches of this rank in an epoch, where the loader itself can't know them."""
        return None

    def validate_resumable(self, place: Place) -> None:
        """Raise `RuntimeError` where an iteration can't start from this place."""

    def validate_state(self, state: Any) -> Any:
        """A state of what is read as it can be gone on from here; raises `RuntimeError` where it can't."""
        return state

    def resume_counts(self, place: Place) -> None:
        """Recount a place that another number of ranks or another batch size saved."""

    def adopt_seed(self, seed: int | None) -> None:
        """Draw the order from a saved seed."""

    def one_more(self, place: Place) -> Any:
        """Any batch of this rank, to be repeated where it has none left; raises `StopIteration` without one."""
        raise StopIteration
