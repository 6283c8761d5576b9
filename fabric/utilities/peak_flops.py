# SPDX-License-Identifier: Apache-2.0
"""What a device can compute per second at most, from its maker's data sheets."""

import re

import torch

# The kinds of arithmetic in the columns below. A float32 product runs as `tf32` where the user has allowed that.
_COLUMNS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")

_OF_DTYPE = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "int8",
}

# The device's name without `NVIDIA`, `GeForce` and `Tesla`, as a pattern that must match all of it (a laptop's chip or
# a `SUPER` is another device), and 1e12 operations per second: dense (a data sheet's numbers "with sparsity" are
# halved), with tensor cores where the device has them for the type, and 16-bit and 8-bit floating-point products summed
# up in float32, as PyTorch does. None: the device has no such arithmetic, or its maker gives no number.
_TERAFLOPS: dict[str, tuple[float | None, ...]] = {
    # NVIDIA DGX B200 / HGX B200 data sheets, an eighth of the system
    r"B200": (37, 75, 1125, 2250, 2250, 4500, 4500),
    # NVIDIA H100, H200 and GH200 Tensor Core GPU data sheets; NVIDIA H100 architecture white paper, table 2
    r"H100( \d+GB HBM3| SXM.*)": (66.9, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9),
    r"H100 PCIe": (51.2, 51.2, 378, 756, 756, 1513, 1513),
    r"H100 NVL": (60, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5),
    r"H200": (66.9, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9),
    r"H200 NVL": (60, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5),
    r"GH200 .*": (66.9, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9),
    # NVIDIA A100 Tensor Core GPU data sheet
    r"A100( |-).*": (19.5, 19.5, 156, 312, 312, None, 624),
    # NVIDIA A30, A40, A10 data sheets; NVIDIA A10G data sheet (of AWS)
    r"A30": (10.3, 10.3, 82, 165, 165, None, 330),
    r"A40": (None, 37.4, 74.8, 149.7, 149.7, None, 299.3),
    r"A10": (None, 31.2, 62.5, 125, 125, None, 250),
    r"A10G": (None, 35, 35, 70, 70, None, 140),
    # NVIDIA L4, L40, L40S data sheets
    r"L4": (None, 30.3, 60, 121, 121, 242.5, 242.5),
    r"L40": (None, 90.5, 90.5, 181.05, 181.05, 362, 362),
    r"L40S": (None, 91.6, 183, 362.05, 362.05, 733, 733),
    # NVIDIA T4 and V100 data sheets
    r"T4": (None, 8.1, None, None, 65, None, 130),
    r"V100-SXM2-.*": (7.8, 15.7, None, None, 125, None, None),
    r"V100-PCIE-.*": (7, 14, None, None, 112, None, None),
    r"V100S-PCIE-.*": (8.2, 16.4, None, None, 130, None, None),
    # NVIDIA RTX Blackwell GPU architecture white paper, appendices
    r"RTX 5090": (None, 104.8, 104.8, 209.5, 209.5, 419, 838),
    r"RTX 5080": (None, 56.3, 56.3, 112.6, 112.6, 225.1, 450.2),
    r"RTX 5070 Ti": (None, 43.9, 43.9, 87.9, 87.9, 175.8, 351.5),
    # NVIDIA Ada GPU architecture white paper, appendices
    r"RTX 4090": (None, 82.6, 82.6, 165.2, 165.2, 330.3, 660.6),
    r"RTX 4080": (None, 48.7, 48.7, 97.5, 97.5, 194.9, 389.9),
    r"RTX 4070 Ti": (None, 40.1, 40.1, 80.2, 80.2, 160.4, 320.7),
    r"RTX 4070": (None, 29.1, 29.1, 58.3, 58.3, 116.6, 233.2),
    # NVIDIA Ampere GA102 GPU architecture white paper, appendices; 3090 Ti: Ada white paper, appendix A
    r"RTX 3090 Ti": (None, 40, 40, 80, 80, None, 320),
    r"RTX 3090": (None, 35.6, 35.6, 71, 71, None, 284),
    r"RTX 3070": (None, 20.3, 20.3, 40.6, 40.6, None, 162.6),
}

_BRANDS = re.compile(r"^(NVIDIA )?(GeForce |Tesla )?")


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """The most floating-point (or integer) operations per second that a device can do, by its maker's data sheet.

    The numbers are for dense matrix products with tensor cores. The name of a CUDA device is looked up, which
    initialises CUDA.

    Args:
        device: The device.
        dtype: In what the products are computed, or a name: `fp64`, `fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `int8`.
            `torch.float32` counts as `tf32` where PyTorch may use that and the device has it.

    Returns:
        Operations per second; None for a device that is not in the table (every CPU) and for an arithmetic that the
        device doesn't have.

    Raises:
        ValueError: For a name that is none of those.

    Example:
        >>> get_available_flops(torch.device("cpu"), torch.float32) is None
        True
    """
    columns = columns_of(dtype)
    return peak_of(torch.cuda.get_device_name(device), *columns) if device.type == "cuda" else None


def peak_of(name: str, *columns: str) -> int | None:
    """The number of the table for a device with this name, from the first column that has one; None if there is none.

    Example:
        >>> peak_of("NVIDIA A100-SXM4-80GB", "bf16")
        312000000000000
    """
    model = _BRANDS.sub("", name)
    if " MIG " in model:  # a slice of the device
        return None
    for pattern, row in _TERAFLOPS.items():
        if re.fullmatch(pattern, model):
            known = (row[_COLUMNS.index(column)] for column in columns)
            return next((round(teraflops * 1e12) for teraflops in known if teraflops is not None), None)
    return None


def columns_of(dtype: torch.dtype | str) -> tuple[str, ...]:
    """In which columns of the table to look for an arithmetic, the fastest first."""
    if isinstance(dtype, str):
        if dtype not in _COLUMNS:
            raise ValueError(
                f"`get_available_flops(..., {dtype!r})` is not a known arithmetic."
                f" Choose one of {', '.join(_COLUMNS)}, or pass a `torch.dtype`."
            )
        return (dtype,)
    # not `torch.get_float32_matmul_precision`, which raises once a program has used the setting that is read here
    if dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return ("tf32", "fp32")
    return (_OF_DTYPE[dtype],) if dtype in _OF_DTYPE else ()
