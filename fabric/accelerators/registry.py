# SPDX-License-Identifier: Apache-2.0
"""The accelerators by name."""

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.cpu import CPUAccelerator
from fabric.accelerators.cuda import CUDAAccelerator
from fabric.accelerators.mps import MPSAccelerator


class _Accelerators(dict[str, type[Accelerator]]):
    """A dict that also answers to Lightning's `ACCELERATOR_REGISTRY.available_accelerators()`."""

    def available_accelerators(self) -> list[str]:
        """Every known name, sorted. Not: every kind that this machine has."""
        return sorted(self)


# Every name that `Fabric(accelerator=...)` knows besides "auto" and "gpu".
ACCELERATORS = _Accelerators(cpu=CPUAccelerator, cuda=CUDAAccelerator, mps=MPSAccelerator)
ACCELERATOR_REGISTRY = ACCELERATORS
