# SPDX-License-Identifier: Apache-2.0
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from typing_extensions import override

from fabric.accelerators import (
    ACCELERATOR_REGISTRY,
    ACCELERATORS,
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    Inventory,
    MPSAccelerator,
    cuda,
    find_usable_cuda_devices,
    take_inventory,
)
from fabric.utilities.device_parser import DeviceSpec


def test_names() -> None:
    assert {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator} == ACCELERATORS
    assert {name: kind.name for name, kind in ACCELERATORS.items()} == {"cpu": "cpu", "cuda": "cuda", "mps": "mps"}
    assert ACCELERATOR_REGISTRY.available_accelerators() == ["cpu", "cuda", "mps"]


@pytest.mark.parametrize(
    ("accelerator", "backend", "devices"),
    [
        (CPUAccelerator(), "gloo", [torch.device("cpu"), torch.device("cpu")]),
        (CUDAAccelerator(), "nccl", [torch.device("cuda", 1), torch.device("cuda", 3)]),
        (MPSAccelerator(), "gloo", [torch.device("mps", 1), torch.device("mps", 3)]),
    ],
)
def test_devices_and_backend(accelerator: Accelerator, backend: str, devices: list[torch.device]) -> None:
    assert accelerator.get_parallel_devices([1, 3]) == devices
    assert accelerator.process_group_backend == backend
    accelerator.teardown()


@pytest.mark.parametrize(
    ("kind", "spec", "inventory", "indices"),
    [
        (CPUAccelerator, None, Inventory(cpu_cores=8), (0,)),
        (CPUAccelerator, 3, Inventory(cpu_cores=1), (0, 1, 2)),
        (CUDAAccelerator, None, Inventory(cuda_devices=2), (0, 1)),
        (CUDAAccelerator, -1, Inventory(cuda_devices=2), (0, 1)),
        (CUDAAccelerator, (1,), Inventory(cuda_devices=2), (1,)),
        (MPSAccelerator, None, Inventory(mps_devices=1), (0,)),
    ],
)
def test_select(kind: type[Accelerator], spec: DeviceSpec, inventory: Inventory, indices: tuple[int, ...]) -> None:
    assert kind.select_devices(spec, inventory=inventory, said="devices") == indices


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        (
            CPUAccelerator,
            (0, 2),
            "`devices=...` names devices by index, but a machine has one CPU, which any number of processes share."
            " Write the number of processes: `devices=2`.",
        ),
        (
            CPUAccelerator,
            -1,
            "`devices=...` asks for all devices, but a machine has one CPU, which any number of processes share."
            " Write the number of processes, such as `devices=8`.",
        ),
        (
            CUDAAccelerator,
            3,
            "`devices=...` asks for 3 devices, but 2 CUDA devices are visible."
            " Choose at most 2 devices, with indices from 0 to 1.",
        ),
        (
            MPSAccelerator,
            2,
            "`devices=...` asks for 2 devices, but 1 MPS device is visible. Write `devices=1`, or leave it out.",
        ),
    ],
)
def test_select_refused(kind: type[Accelerator], spec: DeviceSpec, message: str) -> None:
    inventory = Inventory(cuda_devices=2, mps_devices=1, cpu_cores=8)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        kind.select_devices(spec, inventory=inventory, said="devices=...")


def test_cpu_on_this_machine() -> None:
    assert CPUAccelerator.is_available()
    assert CPUAccelerator.auto_device_count() == 1
    assert CPUAccelerator.parse_devices("2") == [0, 1]
    assert CPUAccelerator.parse_devices("auto") == [0]
    CPUAccelerator().setup_device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("accelerator", "device", "message"),
    [
        (CPUAccelerator(), "cuda:0", "`CPUAccelerator` cannot set up `cuda:0`. Pass `torch.device('cpu')`."),
        (
            CUDAAccelerator(),
            "cpu",
            "`CUDAAccelerator` cannot set up `cpu`. Pass a device such as `torch.device('cuda', 0)`.",
        ),
        (MPSAccelerator(), "cpu", "`MPSAccelerator` cannot set up `cpu`. Pass `torch.device('mps', 0)`."),
    ],
)
def test_setup_of_another_kind(accelerator: Accelerator, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        accelerator.setup_device(torch.device(device))


def test_inventory_of_this_machine() -> None:
    inventory = take_inventory(os.environ)
    assert inventory.cuda_devices == CUDAAccelerator.auto_device_count() == torch.cuda.device_count()
    assert inventory.mps_devices == MPSAccelerator.auto_device_count()
    assert 1 <= inventory.cpu_cores <= (os.cpu_count() or 1)
    assert (inventory.pid, inventory.parent_pid, inventory.platform) == (os.getpid(), os.getppid(), sys.platform)
    assert inventory.interactive == hasattr(sys, "ps1")
    assert not torch.cuda.is_initialized()


def test_interactive_at_a_prompt() -> None:
    """A real prompt, as a notebook kernel is one too: both set `sys.ps1`."""
    lines = "import os, fabric.accelerators as a\nprint('seen', a.take_inventory(os.environ).interactive)\n"
    prompt = subprocess.run([sys.executable, "-i"], input=lines, capture_output=True, text=True, timeout=120)
    assert "seen True" in prompt.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_find_usable_cuda_devices_without_cuda() -> None:
    assert cuda.find_usable_cuda_devices is find_usable_cuda_devices
    assert find_usable_cuda_devices() == []
    message = "`find_usable_cuda_devices(2)` asks for 2 devices, but 0 are visible."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_usable_cuda_devices(2)
    message = "`find_usable_cuda_devices(-2)` is negative. Write a number, or -1 for all."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_usable_cuda_devices(-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_device() -> None:
    before = torch.get_float32_matmul_precision()
    CUDAAccelerator().setup_device(torch.device("cuda", 0))
    assert torch.cuda.current_device() == 0
    assert torch.get_float32_matmul_precision() == before
    assert 0 in find_usable_cuda_devices()


class _Abacus(Accelerator):
    """What a user writes for a kind of device of their own."""

    name = "abacus"

    @override
    def setup_device(self, device: torch.device) -> None:
        pass

    @staticmethod
    @override
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        return [torch.device("meta") for _ in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        return 2


@pytest.mark.parametrize(("devices", "indices"), [(1, [0]), ("auto", [0, 1]), ([1], [1])])
def test_an_accelerator_of_the_users_own(devices: Any, indices: list[int]) -> None:
    assert _Abacus.is_available()
    assert _Abacus.count_devices(Inventory()) == 2
    assert _Abacus.parse_devices(devices) == indices
