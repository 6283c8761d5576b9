# SPDX-License-Identifier: Apache-2.0
"""The last words of a job."""

import contextlib
import sys


def show(text: str) -> None:
    """Write `text` to the error stream, after all that this process has written before."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or the reader of a pipe is gone
            stream.flush()
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()
