# SPDX-License-Identifier: Apache-2.0
"""The base of the accelerators: one kind of device, how many there are, and how a process takes hold of one."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from fabric.accelerators.inventory import Inventory, take_inventory
from fabric.utilities.device_parser import DeviceSpec, parse_devices, select_devices


class Accelerator(ABC):
    """One kind of device.

    A kind of your own names itself, says how many devices there are (`auto_device_count`), which `torch.device` each
    index is (`get_parallel_devices`), and how a process takes hold of one (`setup_device`).
    """

    name: ClassVar[str]
    process_group_backend: ClassVar[str] = "gloo"

    @abstractmethod
    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process. Runs once in every process, after the launch.

        Raises:
            ValueError: Where `device` is of another kind.
        """

    def teardown(self) -> None:
        """Let go of cached memory. Runs once in every process, at the end."""

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        """The `torch.device` of each index, one for each process of this machine (or for each replica)."""

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """How many devices `devices="auto"` takes. Must not initialise a device."""

    @classmethod
    def is_available(cls) -> bool:
        """Whether this machine has such a device. Does not initialise it."""
        return cls.auto_device_count() > 0

    @classmethod
    def count_devices(cls, inventory: Inventory) -> int:
        """How many devices of this kind `inventory` holds. The plan asks here, so that it can be tested by hand."""
        return cls.auto_device_count()

    @classmethod
    def select_devices(cls, devices: DeviceSpec, *, inventory: Inventory, said: str) -> tuple[int, ...]:
        """The indices that `devices` means on a machine with `inventory`; `said` is how the user wrote it.

        Raises:
            ValueError: Where there are fewer devices than asked for, or none with an index.
        """
        return select_devices(devices, available=cls.count_devices(inventory), kind=cls.name.upper(), said=said)

    @classmethod
    def parse_devices(cls, devices: int | str | Sequence[int]) -> list[int]:
        """The indices that `devices` means on this machine: `2`, `"2"`, `"0,2"`, `[0, 2]`, `"auto"` or `-1`.

        Example:
            >>> from fabric.accelerators import CPUAccelerator
            >>> CPUAccelerator.parse_devices("2")
            [0, 1]
        """
        said = f"devices={devices!r}"
        spec = parse_devices(devices, said=said)
        return list(cls.select_devices(spec, inventory=take_inventory(os.environ), said=said))
