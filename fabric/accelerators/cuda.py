# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs (and AMD GPUs with a ROCm build of PyTorch)."""

import os
from collections.abc import Sequence

import torch
from typing_extensions import override

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.inventory import Inventory, count_cuda_devices


class CUDAAccelerator(Accelerator):
    """CUDA devices. Counting and choosing them initialises nothing; `setup_device` is the first call that does."""

    name = "cuda"
    process_group_backend = "nccl"

    @override
    def setup_device(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"`CUDAAccelerator` cannot set up `{device}`. Pass a device such as `torch.device('cuda', 0)`."
            )
        torch.cuda.set_device(device)

    @override
    def teardown(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @staticmethod
    @override
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        return [torch.device("cuda", index) for index in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        return count_cuda_devices(os.environ)

    @classmethod
    @override
    def count_devices(cls, inventory: Inventory) -> int:
        return inventory.cuda_devices


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Indices of CUDA devices that accept work now, for machines whose devices other people hold exclusively.

    Tries each visible device by putting a tensor on it, which initialises CUDA in this process: call it before
    `Fabric(devices=...)` in a script, not in a notebook that forks its ranks.

    Args:
        num_devices: How many to find; -1 for all that are usable.

    Raises:
        ValueError: Where fewer devices are visible than asked for.
        RuntimeError: Where fewer devices are usable than asked for.

    Example:
        >>> from fabric.accelerators.cuda import find_usable_cuda_devices
        >>> find_usable_cuda_devices(0)
        []
    """
    if num_devices < -1:
        raise ValueError(f"`find_usable_cuda_devices({num_devices})` is negative. Write a number, or -1 for all.")
    visible = count_cuda_devices(os.environ)
    if num_devices > visible:
        raise ValueError(
            f"`find_usable_cuda_devices({num_devices})` asks for {num_devices} devices, but {visible} are visible."
        )
    usable: list[int] = []
    for index in range(visible):
        if len(usable) == num_devices:
            break
        if _accepts_work(index):
            usable.append(index)
    if len(usable) < num_devices:
        raise RuntimeError(
            f"`find_usable_cuda_devices({num_devices})` asks for {num_devices} devices, but only {usable} of the"
            f" {visible} visible ones accept work. Other processes may hold them exclusively; see `nvidia-smi`."
        )
    return usable


def _accepts_work(index: int) -> bool:
    try:
        torch.zeros(1, device=torch.device("cuda", index))
    except RuntimeError:
        return False
    return True
