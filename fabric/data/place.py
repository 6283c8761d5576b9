# SPDX-License-Identifier: Apache-2.0
"""A place in the data."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from fabric.utilities.distributed import OrderEnd


@dataclass
class Place:
    """Where an iteration is: `position` batches of this rank (`consumed` items of the global order) into an epoch.

    Attributes:
        epoch: The epoch.
        position: Batches that were yielded on this rank.
        consumed: Items of the global order that all ranks took for them.
        begun: The position at which the iteration started.
        exhausted: The epoch is over.
        left: The epoch has advanced: its iterator is gone, or another one has started.
        padded: The batch yielded last is a repetition, because other ranks still had data.
        end: Tells the length of the global order, once it is known.
        stream: The state of what is read, after the batch yielded last; None where it has none or shows it itself.
        resume: The state of what is read, from which this iteration starts.
    """

    epoch: int
    position: int = 0
    consumed: int = 0
    begun: int = 0
    exhausted: bool = False
    left: bool = False
    padded: bool = False
    end: OrderEnd | None = None
    stream: Any = None
    resume: Any = None


class Placed(ABC):
    """An iterable over data that says where it is."""

    __slots__ = ()

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """The epoch, and how many of its items were yielded on this rank."""
