# SPDX-License-Identifier: Apache-2.0
"""Making an overridden `run` launch the processes that it then runs on."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def launching(cls: type, run: Callable[..., Any]) -> Callable[..., Any]:
    """The `run` of `cls`, a subclass of `Fabric`, such that calling it launches; on a rank it only runs."""

    @wraps(run)
    def launch_and_run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.launch(_run_of, cls, args, kwargs)

    return launch_and_run


def _run_of(fabric: Any, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that a spawned process can import, which the user's replaced method is not."""
    return cls.__dict__["run"].__wrapped__(fabric, *args, **kwargs)
