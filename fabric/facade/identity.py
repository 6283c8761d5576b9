# SPDX-License-Identifier: Apache-2.0
"""Who this process is, and what was chosen for it."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from fabric import validation
from fabric.accelerators import Accelerator
from fabric.debugging import Checks
from fabric.plan import Plan
from fabric.plugins.precision import Precision
from fabric.strategies import Strategy
from fabric.watching import Screen


class Identity(ABC):
    """The plan, and this process's place in it. The constructor of `Fabric` sets what is read here."""

    _plan: Plan
    _accelerator: Accelerator
    _strategy: Strategy
    _precision: Precision
    _screen: Screen
    _checks: Checks
    _launched: bool

    @abstractmethod
    def launch(self) -> Any:
        """Start the other processes and join them."""

    def _require_launch(self, call: str, /, *data: Any, **options: Any) -> None:
        """One process launches by itself; several wait for the user's `launch()`. Debug mode compares the ranks here.

        Args:
            call: The method.
            *data: What it was given, where shapes and dtypes must be the same on all ranks.
            **options: What else must be the same; `group` is the process group that the call is for.
        """
        if not self._launched:
            validation._validate_launched(call, self._plan)
            self.launch()
        self._checks.call(call, *data, **options)

    def __repr__(self) -> str:
        return self._plan.summary()

    @property
    def plan(self) -> Plan:
        """What runs, and why."""
        return self._plan

    def explain(self) -> str:
        """The plan as a table: what was chosen and why, a line each; after `setup` what was chosen there too."""
        return self._plan.explain(self._strategy.setup_rows())

    @property
    def accelerator(self) -> Accelerator:
        """The kind of device."""
        return self._accelerator

    @property
    def strategy(self) -> Strategy:
        """Where the parallelism lives."""
        return self._strategy

    @property
    def precision(self) -> Precision:
        """Where the dtypes live."""
        return self._precision

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._strategy.root_device

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return self._strategy.global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._strategy.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return self._strategy.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self._strategy.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.global_rank == 0

    @property
    def is_local_zero(self) -> bool:
        """Whether this is rank 0 of its machine."""
        return self.local_rank == 0
