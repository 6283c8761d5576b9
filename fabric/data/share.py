# SPDX-License-Identifier: Apache-2.0
"""What one rank's batch is of the global one."""

from typing import NamedTuple


class Share(NamedTuple):
    """How one rank's batch belongs to the global batch, which all data-parallel ranks see together.

    Args:
        valid: The first `valid` samples of this rank's batch are real, and the others repeat what another batch holds,
            so that all ranks take the same number of steps. None: all of them are real.
        interleaved: True where sample `j` of rank `r` of `n` is item `j * n + r` of the global batch; False where the
            ranks' batches follow one another in the order of ranks.

    Example:
        >>> Share(valid=2, interleaved=True)
        Share(valid=2, interleaved=True)
    """

    valid: int | None
    interleaved: bool


class Dealt(NamedTuple):
    """How the items of an order are dealt over the ranks: rank `r` of `n` takes `order[r::n]`, padded at the end.

    Args:
        num_replicas: Number of ranks.
        rank: This one.
        batch_size: Items of this rank that make a batch; None where an item is a batch of its own.
    """

    num_replicas: int
    rank: int
    batch_size: int | None

    @property
    def stride(self) -> int:
        """Items that all ranks together take for one batch each."""
        return self.num_replicas * (self.batch_size or 1)

    def share(self, consumed: int, length: int | None) -> Share:
        """The share of a batch.

        Args:
            consumed: Items that all ranks had taken before it.
            length: Items of the order; None while no end is known, thus nothing padded yet.
        """
        if length is None:
            return Share(None, interleaved=self.batch_size is not None)
        real = max(0, -((consumed + self.rank - length) // self.num_replicas))
        if self.batch_size is None:
            return Share(None if real else 0, interleaved=False)
        return Share(None if real >= self.batch_size else real, interleaved=True)
