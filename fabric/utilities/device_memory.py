# SPDX-License-Identifier: Apache-2.0
"""How much memory this process holds on a device."""

import sys
from pathlib import Path
from typing import Any

import torch


def device_memory(device: torch.device) -> dict[str, int]:
    """What this process holds on a device now, and held at most, in bytes.

    On a CPU it is the whole process: Python, PyTorch and everything else. Nothing is synchronised, and on a CUDA device
    that this process has not used yet all numbers are 0.

    Args:
        device: The device.

    Returns:
        `allocated` (held by tensors; on a CPU, resident), `reserved` (asked of the system; on a CPU, the same) and
        `peak` (the most that was ever allocated); without those that the system does not tell.

    Example:
        >>> memory = device_memory(torch.device("cpu"))
        >>> 0 < memory["allocated"] <= memory["peak"]
        True
    """
    if device.type == "cpu":
        return _process_memory()
    if device.type == "mps":
        return {
            "allocated": torch.mps.current_allocated_memory(),
            "reserved": torch.mps.driver_allocated_memory(),
        }
    backend: Any = torch.get_device_module(device)
    return {
        "allocated": int(backend.memory_allocated(device)),
        "reserved": int(backend.memory_reserved(device)),
        "peak": int(backend.max_memory_allocated(device)),
    }


def _process_memory() -> dict[str, int]:
    status = Path("/proc/self/status")
    if status.exists():
        lines = (line.split() for line in status.read_text().splitlines())
        kibibytes = {words[0]: int(words[1]) for words in lines if words and words[0] in ("VmRSS:", "VmHWM:")}
        if len(kibibytes) == 2:
            resident = kibibytes["VmRSS:"] * 1024
            # The kernel updates the peak a little later than the resident size.
            return {
                "allocated": resident,
                "reserved": resident,
                "peak": max(resident, kibibytes["VmHWM:"] * 1024),
            }
    return _peak_alone()


def _peak_alone() -> dict[str, int]:
    """Systems without `/proc` tell the peak only, and Windows nothing."""
    if sys.platform == "win32":
        return {}
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
