# SPDX-License-Identifier: Apache-2.0
"""The last words of a job."""

import contextlib
import io
import sys
from typing import TextIO


def error_stream() -> TextIO | None:
    """Where errors are shown. PyTorch's `sys.excepthook` holds `sys.stderr` back while it calls the one before."""
    held_back = isinstance(sys.stderr, io.StringIO)
    return sys.__stderr__ if held_back else sys.stderr


def show(text: str) -> None:
    """Write `text` to the error stream, after all that this process has written before."""
    stream = error_stream()
    for written in (sys.stdout, stream):
        with contextlib.suppress(Exception):  # closed, or the reader of a pipe is gone
            written.flush()  # type: ignore[union-attr]
    with contextlib.suppress(Exception):
        stream.write(text)  # type: ignore[union-attr]
        stream.flush()  # type: ignore[union-attr]
