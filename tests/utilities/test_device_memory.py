# SPDX-License-Identifier: Apache-2.0
import sys

import pytest
import torch

from fabric.utilities.device_memory import device_memory

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the resident size")
def test_the_memory_of_a_process_holds_its_tensors() -> None:
    before = device_memory(CPU)
    held = torch.ones(2**24)  # 64 MiB
    after = device_memory(CPU)
    assert after["allocated"] - before["allocated"] > 0.8 * held.nbytes
    assert after["peak"] >= after["allocated"] == after["reserved"]
    del held
    assert device_memory(CPU)["peak"] > 0.9 * after["allocated"]  # the kernel's counters are a little late


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_memory_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    before = device_memory(device)["allocated"]
    held = torch.ones(2**20, device=device)
    memory = device_memory(device)
    assert memory["allocated"] - before == held.nbytes
    assert memory["allocated"] <= memory["peak"]
    assert memory["allocated"] <= memory["reserved"]
