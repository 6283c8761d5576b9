# SPDX-License-Identifier: Apache-2.0
"""What a rank says about the call that it is about to make."""

import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fabric.utilities.apply_func import apply_to_tensors

_SHOWN = 4  # so many differences are shown, the rest is counted
# Between the user's line and a check stand only frames of these.
_NOT_THE_USER = frozenset(("fabric", "torch", "contextlib", "functools"))


@dataclass(frozen=True)
class Record:
    """One call of one rank.

    Args:
        rank: The global rank.
        call: What it does, such as "`fabric.barrier`".
        file: The user's file.
        line: The line in it.
        must_agree: What must be the same on all ranks, such as `float32 [2, 3]`; one entry for each tensor or option.
        fingerprints: Name and hash of what is compared; no error shows the hashes.
    """

    rank: int
    call: str
    file: str
    line: int
    must_agree: tuple[str, ...] = ()
    fingerprints: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> tuple[str, int]:
        """The line, under a name that is the same on machines which keep the code in different folders."""
        return os.path.basename(self.file), self.line

    def __str__(self) -> str:
        return f"{self.call} at {self.file}:{self.line}"

    def describe(self) -> str:
        """The call with what it was given."""
        shown, more = ", ".join(self.must_agree[:_SHOWN]), len(self.must_agree) - _SHOWN
        given = f" with {shown}{f', and {more} more' if more > 0 else ''}" if shown else ""
        return f"{self}{given}"

    def dump(self) -> str:
        """As text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: bytes | str) -> Self:
        """From what `dump` returned."""
        fields = json.loads(text)
        fields["must_agree"] = tuple(fields["must_agree"])
        fields["fingerprints"] = tuple((name, value) for name, value in fields["fingerprints"])
        return cls(**fields)


def find_place() -> tuple[str, int]:
    """File and line of the user's code that led here, from the main thread where autograd runs in another one."""
    main = threading.main_thread().ident
    in_main = threading.get_ident() == main
    frame: FrameType | None = sys._getframe() if in_main or main is None else sys._current_frames().get(main)
    last = frame
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USER:
            return frame.f_code.co_filename, frame.f_lineno
        last, frame = frame, frame.f_back
    return (last.f_code.co_filename, last.f_lineno) if last is not None else ("?", 0)


def describe_tensors(data: Any, *, ragged: bool = False) -> list[str]:
    """Dtype and shape of each tensor (or number) in any nesting of containers.

    Args:
        data: A tensor or any nesting.
        ragged: Only the number of dimensions must agree, not their sizes.
    """
    found: list[str] = []

    def describe(value: Tensor | float) -> Any:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        shape = f"with {tensor.dim()} dimensions" if ragged else str(list(tensor.shape))
        found.append(f"{str(tensor.dtype).removeprefix('torch.')} {shape}")
        return value

    apply_to_tensors(data, describe, number=describe)
    return found


def validate_same(records: Sequence[Record]) -> None:
    """Check that all ranks make one call, at one place, with what must agree; else raise the same error on each.

    Raises:
        RuntimeError: With each rank's call.
    """
    if len({record.call for record in records}) > 1:
        raise RuntimeError(
            f"The ranks make different calls:\n{_list_by_rank((r.rank, r.describe()) for r in records)}\n"
            "All ranks must make the same collective calls in the same order. Look for an `if` or a loop that not all"
            " of them take."
        )
    if len({record.place for record in records}) > 1:
        raise RuntimeError(
            f"The ranks are at different places in {records[0].call}:\n"
            f"{_list_by_rank((r.rank, f'{r.file}:{r.line}') for r in records)}\nThey would take part in each other's"
            " collectives. Let all ranks reach the same line, or give each branch its values and make one call."
        )
    if len({record.must_agree for record in records}) > 1:
        shown = _list_by_rank((r.rank, text) for r, text in zip(records, _differences(records), strict=True))
        raise RuntimeError(
            f"{records[0]}: what the ranks pass is not alike:\n{shown}\nPass tensors of the same"
            " shapes and dtypes, in the same order, and the same options."
        )


def _differences(records: Sequence[Record]) -> list[str]:
    """For each rank, what it has where the ranks differ."""
    length = max(len(record.must_agree) for record in records)
    columns = [[_item(record.must_agree, i) for record in records] for i in range(length)]
    unlike = [i for i in range(length) if len(set(columns[i])) > 1]
    texts = []
    for n in range(len(records)):
        parts = [f"{columns[i][n]}" if length == 1 else f"{columns[i][n]} (item {i})" for i in unlike[:_SHOWN]]
        more = len(unlike) - _SHOWN
        texts.append(", ".join(parts) + (f", and {more} more" if more > 0 else ""))
    return texts


def _item(items: Sequence[str], index: int) -> str:
    return items[index] if index < len(items) else "nothing"


def _list_by_rank(texts: Iterable[tuple[int, str]]) -> str:
    """One line for each different text, with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks_of.setdefault(text, []).append(rank)
    return "\n".join(f"  {name_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2-5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
