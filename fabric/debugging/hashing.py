# SPDX-License-Identifier: Apache-2.0
"""Short fingerprints of tensors and batches."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from fabric.utilities.apply_func import apply_to_tensors
from fabric.utilities.local_parts import local_part

_BYTES = 8


def fingerprint(data: Any) -> str:
    """A hash over dtype, shape and bits of the tensors, arrays and numbers in any nesting of containers.

    Args:
        data: A tensor or any nesting. Text and what has no elements is left out. Of a tensor that is spread over
            ranks this rank's part counts.
    """
    digest = hashlib.blake2b(digest_size=_BYTES)

    def add(value: Tensor | float) -> Any:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(_bits(tensor))
        return value

    def add_other(value: Any) -> Any:
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
            return value
        return NotImplemented

    apply_to_tensors(data, add, add_other, number=add)
    return digest.hexdigest()


def _bits(tensor: Tensor) -> bytes:
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return b""
    plain = local_part(tensor).detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
