# SPDX-License-Identifier: Apache-2.0
"""The plan: every choice with its reason."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from fabric.accelerators import Accelerator
from fabric.plugins.environments import ClusterEnvironment
from fabric.plugins.io import CheckpointIO
from fabric.plugins.precision import Precision
from fabric.strategies import Strategy

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """One decision.

    Args:
        value: What was chosen.
        reason: Why, such as `argument` or `auto: 4 CUDA devices visible`.
        label: What `explain()` shows for the value; by default `str(value)`.
    """

    value: T
    reason: str
    label: str = ""

    def __str__(self) -> str:
        return self.label or str(self.value)


@dataclass(frozen=True)
class DebugOptions:
    """The numbers of debug mode.

    Args:
        timeout: Seconds that a rank waits for the others at a collective.
        every: Steps of an optimizer after which replicas are compared.
    """

    timeout: float = 60.0
    every: int = 100


@dataclass(frozen=True)
class Plan:
    """What `Fabric(...)` will run. Made by `resolve`; nothing has been started or initialised yet.

    Args:
        accelerator: The kind of device.
        devices: Indices of this machine's devices.
        num_nodes: Machines of the job.
        strategy: How the loop runs on the devices; not yet bound to them.
        precision: Which dtypes it computes in.
        launcher: How the ranks of this machine start: `none`, `subprocess`, `spawn`, `fork`, `forkserver`, or
            `external` where each is a process already.
        environment: Who this process is in the job.
        threads: Threads of each rank; None leaves them alone.
        checkpoint_io: Reads and writes single files; None for the strategy's own.
        debug: The checks of debug mode; None, and not shown, where it is off.
    """

    accelerator: Choice[Accelerator]
    devices: Choice[tuple[int, ...]]
    num_nodes: Choice[int]
    strategy: Choice[Strategy]
    precision: Choice[Precision]
    launcher: Choice[str]
    environment: Choice[ClusterEnvironment]
    threads: Choice[int | None]
    checkpoint_io: Choice[CheckpointIO | None]
    debug: Choice[DebugOptions | None]

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.environment.value.world_size()

    def explain(self, more: Sequence[tuple[str, str, str]] = ()) -> str:
        """The plan as a table: one row for each choice, its reason last.

        Args:
            more: Further rows of name, value and reason.
        """
        shown = [field.name for field in fields(self) if field.name != "debug" or self.debug.value is not None]
        rows = [(name, str(getattr(self, name)), getattr(self, name).reason) for name in shown]
        rows += more
        name_width = max(len(name) for name, *_ in rows) + 2
        value_width = max(len(value) for _, value, _ in rows) + 2
        return "\n".join(f"{name:<{name_width}}{value:<{value_width}}{reason}" for name, value, reason in rows)

    def summary(self) -> str:
        """The plan in one line, without reasons."""
        names = ("accelerator", "devices", "num_nodes", "strategy", "precision", "launcher")
        parts = [f"{name}={getattr(self, name)!s}" for name in names]
        return ", ".join([*parts, f"world_size={self.world_size}"])
