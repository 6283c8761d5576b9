# SPDX-License-Identifier: Apache-2.0
"""The GPU of an Apple computer, through Metal."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.inventory import Inventory, count_mps_devices


class MPSAccelerator(Accelerator):
    """The one Metal device of a Mac."""

    name = "mps"

    @override
    def setup_device(self, device: torch.device) -> None:
        if device.type != "mps":
            raise ValueError(f"`MPSAccelerator` cannot set up `{device}`. Pass `torch.device('mps', 0)`.")

    @override
    def teardown(self) -> None:
        if torch.backends.mps.is_available():
            torch.mps.empty_cache()

    @staticmethod
    @override
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        return [torch.device("mps", index) for index in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        return count_mps_devices()

    @classmethod
    @override
    def count_devices(cls, inventory: Inventory) -> int:
        return inventory.mps_devices
