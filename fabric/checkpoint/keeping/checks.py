# SPDX-License-Identifier: Apache-2.0
"""What a `CheckpointManager` accepts."""

import os
import signal
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from torch import Tensor

from fabric.checkpoint.keeping.rules import Best
from fabric.utilities.types import PathLike

_CALL = "CheckpointManager"


def validated_directory(directory: Any) -> str:
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise TypeError(
            f"`{_CALL}({directory!r}, ...)` takes a folder first. Write `{_CALL}('runs/a', fabric=fabric)`."
        )
    path: PathLike = directory
    return str(os.fspath(path))


def validated_count(keep_last: Any) -> int | None:
    if keep_last is not None and not _is_positive(keep_last):
        raise ValueError(
            f"`{_CALL}(keep_last={keep_last!r})` takes the number of checkpoints that stay, 1 or more, or None for all."
        )
    return keep_last  # type: ignore[no-any-return]


def validated_best(keep_best: Any) -> Best | None:
    if keep_best is None:
        return None
    match keep_best:
        case [str(), "min" | "max"]:
            return Best(*keep_best)
        case [str(), "min" | "max", count] if _is_positive(count):
            return Best(*keep_best)
    raise ValueError(
        f"`{_CALL}(keep_best={keep_best!r})` takes the name of a metric and whether its smallest or largest value is"
        " the best: `('val_loss', 'min')`, or `('val_loss', 'min', 3)` for the three best."
    )


def validated_interval(every: Any) -> int | timedelta:
    if not _is_positive(every) and not (isinstance(every, timedelta) and every > timedelta()):
        hint = f" For seconds write `timedelta(seconds={every!r})`." if isinstance(every, float) else ""
        raise ValueError(
            f"`{_CALL}(every={every!r})` takes a number of steps, 1 or more, or a `datetime.timedelta`.{hint}"
        )
    return every  # type: ignore[no-any-return]


def validated_signals(signals: Any) -> tuple[int, ...]:
    untaken = {getattr(signal, name) for name in ("SIGKILL", "SIGSTOP", "SIGINT") if hasattr(signal, name)}
    if isinstance(signals, Iterable) and not isinstance(signals, str):
        numbers = tuple(signals)
        if all(isinstance(number, int) and number in signal.valid_signals() - untaken for number in numbers):
            return numbers
    raise ValueError(
        f"`{_CALL}(signals={signals!r})` takes signals that announce the end of the job, such as"
        " `(signal.SIGTERM, signal.SIGUSR1)`; not SIGINT, which is Ctrl-C, and none that can't be handled."
    )


def validate_step(step: Any) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"`{_CALL}.save(step={step!r}, ...)` takes the number of the step, an integer, 0 or more.")


def validate_metrics(metrics: Any, best: Best | None) -> None:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(
            f"`{_CALL}.save(step, state, metrics)` takes a dictionary of names and numbers, but got"
            f" `{type(metrics).__name__}`. Write `{{'val_loss': loss}}`."
        )
    if metrics is not None and best is not None and best.metric not in metrics:
        names = ", ".join(f"`{name}`" for name in metrics) or "nothing"
        raise ValueError(
            f"`{_CALL}.save(step, state, metrics)`: `metrics` holds {names}, and `keep_best` needs `{best.metric}`."
            " Add it, or leave `metrics` out for a checkpoint that is none of the best."
        )


def numbers(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """The metrics as plain numbers; reading a tensor waits for its device."""
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"`{_CALL}.save(step, state, metrics)`: the name {name!r} is no text.")
    return name


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes) or (isinstance(value, Tensor) and value.numel() != 1):
            raise TypeError
        return float(value.item() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise TypeError(
            f"`{_CALL}.save(step, state, metrics)`: `metrics['{name}']` is a `{type(value).__name__}`{shape}."
            " Pass a number, or a tensor with one element."
        ) from None


def validate_has_best(best: Best | None) -> None:
    if best is None:
        raise ValueError(
            f"`{_CALL}` knows no best checkpoint without `keep_best`."
            f" Write `{_CALL}(..., keep_best=('val_loss', 'min'))`."
        )


def validate_choice(which: Any, best: Best | None) -> None:
    is_step = isinstance(which, int) and not isinstance(which, bool)
    if not is_step and which not in ("latest", "best"):
        raise ValueError(
            f"`{_CALL}.restore(state, {which!r})` knows no such checkpoint. Choose 'latest', 'best', or the number of a"
            " step."
        )
    if which == "best":
        validate_has_best(best)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
