# SPDX-License-Identifier: Apache-2.0
"""The names of the checkpoints in a folder, and which of them stay."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

_NAME = re.compile(r"step-(\d{8,})\.ckpt")


class Kept(NamedTuple):
    """A complete checkpoint of a folder.

    Args:
        step: Its number.
        path: For `fabric.load`.
        metrics: The numbers that were given to `save`.
    """

    step: int
    path: str
    metrics: Mapping[str, float]


class Best(NamedTuple):
    """What makes one checkpoint better than another.

    Args:
        metric: Name of a number that `save` is given.
        mode: Whether a smaller or a larger one is better.
        keep: How many of the best stay.
    """

    metric: str
    mode: Literal["min", "max"]
    keep: int = 1

    def ordered(self, checkpoints: Iterable[Kept]) -> list[Kept]:
        """Those that have the metric, the best one first and, of equal ones, the earliest; NaN is none."""
        sign = 1.0 if self.mode == "min" else -1.0
        measured = [kept for kept in checkpoints if not math.isnan(kept.metrics.get(self.metric, math.nan))]
        return sorted(measured, key=lambda kept: (sign * kept.metrics[self.metric], kept.step))


def superseded(checkpoints: Sequence[Kept], *, last: int | None, best: Best | None, newest: int) -> list[Kept]:
    """Those that need not stay.

    Args:
        checkpoints: In the order of steps.
        last: How many of the last ones stay; None for all.
        best: Which others stay.
        newest: The step that was just written, which stays in any case.
    """
    if last is None:
        return []
    stay = {kept.step for kept in checkpoints[-last:]} | {newest}
    if best is not None:
        stay |= {kept.step for kept in best.ordered(checkpoints)[: best.keep]}
    return [kept for kept in checkpoints if kept.step not in stay]


def name_of(step: int) -> str:
    """The name of a step's checkpoint: a file or a folder, as the strategy has it."""
    return f"step-{step:08d}.ckpt"


def note_of(name: str) -> str:
    """The name of the note that lies beside a checkpoint."""
    return f"{name.removesuffix('.ckpt')}.json"


def step_of(name: str) -> int | None:
    """The step of a checkpoint; None for names that are not of this kind."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and name_of(int(match[1])) == name else None


def noted_step(name: str) -> int | None:
    """The step of a note; None for names that are not of this kind."""
    return step_of(f"{name.removesuffix('.json')}.ckpt") if name.endswith(".json") else None


def note_with(step: int, metrics: Mapping[str, float]) -> bytes:
    """The content of a note. JSON has no name for infinity and NaN, so they are texts."""
    numbers = {key: value if math.isfinite(value) else str(value) for key, value in metrics.items()}
    return f"{json.dumps({'step': step, 'metrics': numbers}, indent=1)}\n".encode()


def read_note(content: bytes, step: int) -> dict[str, float] | None:
    """The metrics in a note; None where it is damaged, or not of this step."""
    try:
        read: Any = json.loads(content)
        return {str(key): float(value) for key, value in read["metrics"].items()} if read["step"] == step else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
