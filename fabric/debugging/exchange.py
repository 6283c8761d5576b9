# SPDX-License-Identifier: Apache-2.0
"""How the ranks tell each other what they are about to do, without a collective that could itself hang."""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from fabric.debugging.record import Record, name_ranks
from fabric.strategies import Strategy

_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.05  # seconds between two looks into the store
_FAREWELL = 2.0  # seconds that rank 0 keeps the store for ranks that leave later
_COMPLETE = "complete"


class Exchange:
    """Notes of the ranks in a store on rank 0. A rank puts its own there and waits until those of the others are.

    The nth note of a rank for a group of ranks meets the nth notes of the others, whichever calls they are about, so
    ranks that make different calls see both of them.

    Args:
        strategy: The strategy; its process group exists.
        timeout: Seconds that a rank waits for the others.
    """

    def __init__(self, strategy: Strategy, timeout: float) -> None:
        self.rank = strategy.global_rank
        self.ranks = tuple(range(strategy.world_size))
        self._timeout = timeout
        self._turns: Counter[tuple[int, ...]] = Counter()
        self._store = _open_store(strategy)

    def meet(self, record: Record, ranks: Sequence[int] | None = None) -> list[Record]:
        """The records of all `ranks` (by default all there are), once each of them has come.

        Raises:
            RuntimeError: On each rank that came, if one did not.
        """
        ranks = self.ranks if ranks is None else tuple(ranks)
        try:
            return self._meet(record, ranks)
        except DistError as error:
            raise RuntimeError(
                f"{record}: rank 0, which holds the notes of debug mode, has ended. Look for its error."
            ) from error

    def _meet(self, record: Record, ranks: tuple[int, ...]) -> list[Record]:
        turn = self._turns[ranks]
        self._turns[ranks] += 1
        base = "-".join(map(str, ranks)) if ranks != self.ranks else "all"
        self._store.set(f"last/{self.rank}", record.dump())
        self._store.set(f"{base}/{turn}/{self.rank}", record.dump())
        # The first to find that all have come, or that time is up, decides for all.
        found = self._wait(record, [f"{base}/{turn}/{rank}" for rank in ranks], ranks)
        verdict = self._store.compare_set(f"{base}/{turn}/verdict", "", found).decode()
        if verdict != _COMPLETE:
            raise RuntimeError(verdict)
        records = [Record.parse(self._store.get(f"{base}/{turn}/{rank}")) for rank in ranks]
        self._forget(base, turn - 2)
        return records

    def _wait(self, record: Record, keys: list[str], ranks: tuple[int, ...]) -> str:
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while not self._store.check(keys):
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
            gone = [rank for rank in missing if self._store.check([f"gone/{rank}"])]
            if gone:
                return f"{record}: rank {gone[0]} will not come. {self._store.get(f'gone/{gone[0]}').decode()}"
            if missing and time.monotonic() > deadline:
                return self._describe_missing(record, missing)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)
        return _COMPLETE

    def _describe_missing(self, record: Record, missing: list[int]) -> str:
        lines = [f"{record}: {name_ranks(missing)} did not come within {self._timeout:g} seconds."]
        for rank in missing:
            key = f"last/{rank}"
            seen = f"last seen at {Record.parse(self._store.get(key))}" if self._store.check([key]) else "never seen"
            lines.append(f"  rank {rank}: {seen}")
        lines.append(
            "They took another way, are stuck, or have ended. If they only need longer, set `FABRIC_DEBUG_TIMEOUT` to"
            " more seconds."
        )
        return "\n".join(lines)

    def _forget(self, base: str, turn: int) -> None:
        """All ranks have read the notes of the turn before the last one: they could not be here otherwise."""
        if turn >= 0:
            self._store.delete_key(f"{base}/{turn}/{self.rank}")

    def leave(self, reason: str) -> None:
        """Tell the ranks that wait for this one, or will, that it does not come any more."""
        try:
            self._store.compare_set(f"gone/{self.rank}", "", reason)
        except DistError:
            return  # rank 0 has ended, and who waits learns that

    def close(self) -> None:
        """Let go of the store. Rank 0 gives the others a moment to say that they leave too."""
        deadline, keys = time.monotonic() + _FAREWELL, [f"gone/{rank}" for rank in self.ranks]
        while self.rank == 0 and not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(_LAST_PAUSE)


def _open_store(strategy: Strategy) -> Store:
    """A store of its own on rank 0, so that nothing else meets its keys."""
    hosts = strategy.global_rank == 0
    open_on = partial(
        TCPStore,
        strategy.environment.main_address,
        is_master=hosts,
        wait_for_workers=False,
        timeout=timedelta(minutes=1),
    )
    if not hosts:
        return open_on(port=strategy.broadcast(0))
    store = open_on(port=0)
    strategy.broadcast(store.port)
    return store
