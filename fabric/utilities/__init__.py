# SPDX-License-Identifier: Apache-2.0
"""The ground floor: subjects that every layer above may use."""

from typing import TYPE_CHECKING

from fabric.utilities.lazy import importing_on_use as _importing_on_use

if TYPE_CHECKING:
    from fabric.utilities.apply_func import convert_tensors_to_scalars, move_data_to_device
    from fabric.utilities.data import AttributeDict, has_iterable_dataset, has_len, suggested_max_num_workers
    from fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
    from fabric.utilities.throughput import Throughput, ThroughputMonitor, measure_flops

__all__ = [
    "AttributeDict",
    "Throughput",
    "ThroughputMonitor",
    "convert_tensors_to_scalars",
    "has_iterable_dataset",
    "has_len",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "suggested_max_num_workers",
]

# Resolved on first use, so that what needs one subject only does not import torch for the others.
_EXPORTS = {
    "AttributeDict": "fabric.utilities.data",
    "Throughput": "fabric.utilities.throughput",
    "ThroughputMonitor": "fabric.utilities.throughput",
    "convert_tensors_to_scalars": "fabric.utilities.apply_func",
    "has_iterable_dataset": "fabric.utilities.data",
    "has_len": "fabric.utilities.data",
    "measure_flops": "fabric.utilities.throughput",
    "move_data_to_device": "fabric.utilities.apply_func",
    "rank_zero_info": "fabric.utilities.rank_zero",
    "rank_zero_only": "fabric.utilities.rank_zero",
    "rank_zero_warn": "fabric.utilities.rank_zero",
    "suggested_max_num_workers": "fabric.utilities.data",
}


__getattr__ = _importing_on_use(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
