# SPDX-License-Identifier: Apache-2.0
"""Whether what should be equal on several ranks is equal."""

from collections.abc import Sequence

from fabric.debugging.exchange import Exchange
from fabric.debugging.record import Record, find_place, name_ranks, validate_same


def compare(exchange: Exchange, call: str, prints: dict[str, str], ranks: Sequence[int], advice: str) -> None:
    """Compare fingerprints over ranks.

    Args:
        exchange: Meets the other ranks.
        call: What is compared and when, for the error.
        prints: Name of what is compared to its fingerprint.
        ranks: Those on which they should be equal.
        advice: Where to look if they are not.

    Raises:
        RuntimeError: On each of these ranks, with the first name that differs.
    """
    file, line = find_place()
    records = exchange.meet(Record(exchange.rank, call, file, line, fingerprints=tuple(prints.items())), ranks)
    validate_same(records)
    if len({record.fingerprints for record in records}) == 1:
        return
    names = [name for record in records for name, _ in record.fingerprints]
    for name in dict.fromkeys(names):
        ranks_of: dict[str, list[int]] = {}
        for record in records:
            ranks_of.setdefault(dict(record.fingerprints).get(name, "missing"), []).append(record.rank)
        if len(ranks_of) > 1:
            sides = " | ".join(name_ranks(ranks) for ranks in ranks_of.values())
            raise RuntimeError(f"{records[0]}: `{name}` is not the same on all ranks: {sides}. {advice}")
