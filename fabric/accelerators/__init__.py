# SPDX-License-Identifier: Apache-2.0
"""Kinds of devices: how many there are, and how a process takes hold of one."""

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.cpu import CPUAccelerator
from fabric.accelerators.cuda import CUDAAccelerator, find_usable_cuda_devices
from fabric.accelerators.inventory import Inventory, take_inventory
from fabric.accelerators.mps import MPSAccelerator
from fabric.accelerators.registry import ACCELERATOR_REGISTRY, ACCELERATORS

__all__ = [
    "ACCELERATORS",
    "ACCELERATOR_REGISTRY",
    "Accelerator",
    "CPUAccelerator",
    "CUDAAccelerator",
    "Inventory",
    "MPSAccelerator",
    "find_usable_cuda_devices",
    "take_inventory",
]
