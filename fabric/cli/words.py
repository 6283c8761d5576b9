# SPDX-License-Identifier: Apache-2.0
"""What the commands for checkpoints have in common."""

import ctypes
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress

_FORMATS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".ckpt": "torch", ".bin": "torch"}

_M_MMAP_THRESHOLD = -3  # of `malloc.h`


def format_of(target: str) -> str | None:
    """The format that a path's ending means; None if it means none."""
    return next((format for ending, format in _FORMATS.items() if target.endswith(ending)), None)


def size_of(count: float) -> str:
    """Bytes for people: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def return_large_memory() -> None:
    """Have this process return the memory of a tensor when it is done with it, where the C library would keep it.

    That of Linux puts large blocks among small ones once it has seen some, and then can't give up what is between them:
    a command that has one tensor at a time would grow to the size of all of them.
    """
    with suppress(OSError, AttributeError, TypeError):  # other systems
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def attempt(command: str, action: Callable[[], None]) -> int:
    """Do what a command does; what goes wrong with files is told without a traceback.

    Returns:
        The exit code.
    """
    try:
        action()
    except BrokenPipeError:  # whoever reads our words has enough of them
        sys.stderr.close()
        return 0
    except (OSError, ValueError, TypeError, RuntimeError, ModuleNotFoundError, pickle.UnpicklingError) as error:
        sys.stdout.flush()
        sys.stderr.write(f"fabric {command}: {error}\n")
        return 1
    return 0
