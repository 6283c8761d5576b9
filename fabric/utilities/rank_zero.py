# SPDX-License-Identifier: Apache-2.0
"""Do something on global rank 0 only. The rank is looked up at each call: nothing here is remembered."""

import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

import torch.distributed as dist

from fabric.processes.token import LaunchToken

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")

log = logging.getLogger("fabric")


def global_rank() -> int:
    """The global rank of this process.

    Once a process group exists, its rank. Before that, the rank that the launcher gave to this process, else `RANK`,
    else `NODE_RANK` (whose processes but one start later, none of them rank 0 unless this one is), else 0.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    token = LaunchToken.from_environ(os.environ, parent_pid=os.getppid())
    if token is not None:
        return token.rank
    for variable in ("RANK", "FABRIC_NODE_RANK", "NODE_RANK"):
        if os.environ.get(variable):
            return int(os.environ[variable])
    return 0


@overload
def rank_zero_only(fn: Callable[P, R]) -> Callable[P, R | None]: ...
@overload
def rank_zero_only(fn: Callable[P, R], default: D) -> Callable[P, R | D]: ...


def rank_zero_only(fn: Callable[P, R], default: D | None = None) -> Callable[P, R | D | None]:
    """Decorate a function so that it runs on global rank 0 only; on the other ranks it returns `default`.

    Example:
        >>> @rank_zero_only
        ... def announce(text):
        ...     print(text)
        >>> announce("hello")
        hello
    """

    @functools.wraps(fn)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | D | None:
        return fn(*args, **kwargs) if global_rank() == 0 else default

    return on_rank_zero


def rank_zero_warn(message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """Warn on global rank 0 only.

    Args:
        message: The text of the warning.
        category: Its class.
        stacklevel: Which line it is shown for: 1 is the line that calls this function, 2 (the default) the line that
            called the function with that line, and so on.
    """
    if global_rank() == 0:
        warnings.warn(message, category, stacklevel=stacklevel + 1)


def rank_zero_info(message: object, *args: object, stacklevel: int = 1) -> None:
    """Log a message at INFO level to the logger named `fabric`, on global rank 0 only.

    Nothing shows unless logging is set up, for example by `logging.basicConfig(level=logging.INFO)`.
    """
    if global_rank() == 0:
        log.info(message, *args, stacklevel=stacklevel + 1)
