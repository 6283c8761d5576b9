# SPDX-License-Identifier: Apache-2.0
"""Leaving the process group at the end of a script."""

import atexit
import sys

import torch.distributed as dist


def leave_group() -> None:
    """Leave the default process group, where the script has not done so."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def leave_group_at_exit() -> None:
    """Leave the process group when the script has ended well; after an error, other ranks may not answer any more."""
    atexit.register(_leave_unless_failed)


def keep_group_at_exit() -> None:
    """Undo `leave_group_at_exit`."""
    atexit.unregister(_leave_unless_failed)


def _leave_unless_failed() -> None:
    if getattr(sys, "last_value", None) is None:
        leave_group()
