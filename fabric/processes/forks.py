# SPDX-License-Identifier: Apache-2.0
"""What a forked child of ours (a data worker, say) must not keep."""

import os
import weakref
from collections.abc import Callable
from typing import Any


def in_forked_children(method: Callable[[], Any]) -> None:
    """Call a bound method in every child that this process forks from now on, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def forget() -> None:
        alive = reference()
        if alive is not None:
            alive()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)
