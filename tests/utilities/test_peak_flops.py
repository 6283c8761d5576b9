# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import torch

from fabric.utilities.peak_flops import columns_of, get_available_flops, peak_of


@pytest.mark.parametrize(
    ("name", "column", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA L4", "fp16", 121),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA A10G", "fp16", 70),
        ("NVIDIA A10", "fp16", 125),
        ("Tesla T4", "fp16", 65),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090 Ti", "fp32", 40),
    ],
)
def test_devices_are_known_by_the_name_that_the_driver_gives(name, column, teraflops) -> None:
    assert peak_of(name, column) == round(teraflops * 1e12)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),  # another chip under nearly the same name
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "bf16"),
        ("NVIDIA L400", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),  # has no such arithmetic
        ("AMD Instinct MI300X", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),  # a seventh of the device
    ],
)
def test_what_is_not_known_has_no_peak(name, column) -> None:
    assert peak_of(name, column) is None


@pytest.mark.parametrize("allow", ["by-the-new-setting", "by-the-old-one"])
def test_float32_products_count_as_tf32_where_they_may_run_so(allow) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    assert columns_of(torch.float32) == ("fp32",)
    try:
        if allow == "by-the-new-setting":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        columns = columns_of(torch.float32)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    assert peak_of("NVIDIA A100-SXM4-80GB", *columns) == round(156e12)
    assert peak_of("Tesla V100-SXM2-16GB", *columns) == round(15.7e12)  # has no tf32, so PyTorch computes in float32


def test_an_unknown_arithmetic() -> None:
    message = (
        "`get_available_flops(..., 'fp12')` is not a known arithmetic."
        " Choose one of fp64, fp32, tf32, bf16, fp16, fp8, int8, or pass a `torch.dtype`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        get_available_flops(torch.device("cpu"), "fp12")
