# SPDX-License-Identifier: Apache-2.0
"""Who a strategy is for: its place in the job, and what the plan decided."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from fabric.accelerators import Accelerator
from fabric.plugins.environments import ClusterEnvironment
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.plugins.precision import Precision, create_precision


class Bound(ABC):
    """The part of a `Strategy` that says who this process is."""

    def __init__(self) -> None:
        self._accelerator: Accelerator | None = None
        self._environment: ClusterEnvironment | None = None
        self._devices: tuple[torch.device, ...] = ()
        self._precision: Precision = Precision()
        self._checkpoint_io: CheckpointIO = TorchCheckpointIO()

    def bind(
        self,
        *,
        accelerator: Accelerator,
        devices: Sequence[torch.device],
        environment: ClusterEnvironment,
        precision: Precision,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        """Complete a strategy with what the plan decided; no process or device is touched.

        Args:
            accelerator: The kind of device.
            devices: The devices of this machine, one for each local rank (or all of them for one process).
            environment: Who this process is in the cluster.
            precision: The precision that surrounds forward, backward and step.
            checkpoint_io: Reads and writes single files; by default the strategy's own.
        """
        self._accelerator = accelerator
        self._devices = tuple(devices)
        self._environment = environment
        self._precision = precision
        self._checkpoint_io = checkpoint_io or self._checkpoint_io

    @property
    def accelerator(self) -> Accelerator:
        """The kind of device that this strategy runs on."""
        if self._accelerator is None:
            raise self._unbound()
        return self._accelerator

    @property
    def environment(self) -> ClusterEnvironment:
        """Who this process is in the cluster."""
        if self._environment is None:
            raise self._unbound()
        return self._environment

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of this machine."""
        if not self._devices:
            raise self._unbound()
        return self._devices

    def _unbound(self) -> RuntimeError:
        name = type(self).__name__
        return RuntimeError(
            f"This `{name}` does not know its devices yet. Pass it to `Fabric(strategy={name}(...))` before you use it."
        )

    @property
    def precision(self) -> Precision:
        """The precision that surrounds forward, backward and step."""
        return self._precision

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Reads and writes the single-file checkpoints."""
        return self._checkpoint_io

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device of this rank."""

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return 1

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return 0

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of the whole job."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """`num_replicas` and `rank` for sharding the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def create_precision(self, name: str, device_type: str) -> Precision:
        """The precision of this full name; runs once, while the plan is made.

        Raises:
            ValueError: If this strategy does not support it.
        """
        return create_precision(name, device_type)
