# SPDX-License-Identifier: Apache-2.0
"""What keeping checkpoints needs of a job. A `Fabric` is one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fabric.checkpoint.access import StateAccess
from fabric.checkpoint.background import SaveHandle
from fabric.checkpoint.layouts import Format

T = TypeVar("T")


class Ranks(StateAccess, Protocol):
    """How the ranks come to one mind. Every `Strategy` is one."""

    def start_boolean_decision(self, decision: bool, all: bool = True) -> Callable[[], bool]: ...


class Job(Protocol):
    """Saves and loads."""

    @property
    def strategy(self) -> Ranks: ...
    def broadcast(self, obj: T, src: int = 0) -> T: ...
    def save(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        *,
        format: Format | None = None,
        max_shard_size: int | str | None = None,
        blocking: bool = True,
        checksum: bool = False,
    ) -> SaveHandle: ...
    def load(
        self, path: str | Path, state: dict[str, Any] | None = None, strict: bool = True, weights_only: bool = True
    ) -> dict[str, Any]: ...
