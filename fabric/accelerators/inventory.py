# SPDX-License-Identifier: Apache-2.0
"""What this machine and this process have to offer, looked at once and without initialising any device."""

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch


class Inventory(NamedTuple):
    """The facts about the machine that decide a plan. Tests write it by hand.

    Args:
        cuda_devices: CUDA devices that this process sees.
        mps_devices: 1 on a Mac with a Metal device, else 0.
        cpu_cores: Cores that this process may run on.
        interactive: True in a notebook or at a Python prompt.
        pid: This process.
        parent_pid: Its parent.
        platform: `sys.platform`.
    """

    cuda_devices: int = 0
    mps_devices: int = 0
    cpu_cores: int = 1
    interactive: bool = False
    pid: int = 0
    parent_pid: int = 0
    platform: str = "linux"


def take_inventory(environ: Mapping[str, str]) -> Inventory:
    """Look at this machine.

    Args:
        environ: The environment of this process; `CUDA_VISIBLE_DEVICES` is read from it.
    """
    return Inventory(
        cuda_devices=count_cuda_devices(environ),
        mps_devices=count_mps_devices(),
        cpu_cores=_count_cores(),
        interactive=hasattr(sys, "ps1"),
        pid=os.getpid(),
        parent_pid=os.getppid(),
        platform=sys.platform,
    )


def count_cuda_devices(environ: Mapping[str, str]) -> int:
    """CUDA devices that this process sees, counted without creating a CUDA context, so that a later fork is clean.

    PyTorch counts through NVML and honours indices and UUIDs in `CUDA_VISIBLE_DEVICES`. NVML cannot count MIG
    instances: PyTorch then asks the CUDA runtime, which spoils a fork. A process can use one MIG instance, the first
    of the list (NVIDIA's MIG user guide, "CUDA device enumeration"), so MIG ids count as one device.
    """
    if not torch.backends.cuda.is_built():
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if visible.startswith("MIG-"):
        return 1
    return torch.cuda.device_count()


def count_mps_devices() -> int:
    """1 where PyTorch can use a Metal device, else 0."""
    return int(torch.backends.mps.is_available())


def _count_cores() -> int:
    """Cores that this process may use: its affinity where the system knows one."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
