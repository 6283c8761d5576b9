# SPDX-License-Identifier: Apache-2.0
"""The CPU: any number of processes on one device."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.inventory import Inventory
from fabric.utilities.device_parser import DeviceSpec


class CPUAccelerator(Accelerator):
    """The CPU. `devices=n` means n processes that share it; `"auto"` is one."""

    name = "cpu"

    @override
    def setup_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"`CPUAccelerator` cannot set up `{device}`. Pass `torch.device('cpu')`.")

    @staticmethod
    @override
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        return [torch.device("cpu") for _ in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        return 1

    @classmethod
    @override
    def select_devices(cls, devices: DeviceSpec, *, inventory: Inventory, said: str) -> tuple[int, ...]:
        if isinstance(devices, tuple):
            raise ValueError(
                f"`{said}` names devices by index, but a machine has one CPU, which any number of processes share."
                f" Write the number of processes: `devices={len(devices)}`."
            )
        if devices == -1:
            raise ValueError(
                f"`{said}` asks for all devices, but a machine has one CPU, which any number of processes share."
                f" Write the number of processes, such as `devices={max(2, inventory.cpu_cores)}`."
            )
        return tuple(range(devices or 1))
