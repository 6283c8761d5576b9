# SPDX-License-Identifier: Apache-2.0
"""Library calls and lines in one training step: what a person steps through in a debugger."""

import sys
from types import FrameType
from typing import Any

from benchmarks.libraries import Subject, quiet, subjects
from benchmarks.report import NAMES, Row, main
from benchmarks.step import train

BOUNDS = {"32-true": (10, 30), "bf16-mixed": (14, 45)}


def count(subject: Subject) -> tuple[int, int]:
    """Calls into, and lines of, the library's own Python files during one step."""
    calls = lines = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal calls
        if not frame.f_code.co_filename.startswith(subject.roots):
            return None
        calls += 1
        return on_line

    train(subject, 5)
    sys.settrace(on_call)
    try:
        train(subject, 1)
    finally:
        sys.settrace(None)
    return calls, lines


def measure(quick: bool) -> list[Row]:
    quiet()
    rows = []
    for precision, (most_calls, most_lines) in BOUNDS.items():
        for name, subject in subjects(precision).items():
            if name == "raw":
                continue
            calls, lines = count(subject)
            bound = ("", None)
            if name == "fabric":
                bound = (f"{most_calls} / {most_lines}", calls <= most_calls and lines <= most_lines)
            rows.append(
                Row(f"library calls / lines in that step, {precision}", NAMES[name], f"{calls} / {lines}", *bound)
            )
    return rows


if __name__ == "__main__":
    main(measure)
