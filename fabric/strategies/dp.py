# SPDX-License-Identifier: Apache-2.0
"""One process that splits each batch over several GPUs."""

from typing import Any

from torch.nn import DataParallel, Module
from typing_extensions import override

from fabric.plugins.precision import Precision
from fabric.strategies.entry import _Entry
from fabric.strategies.single_device import SingleDeviceStrategy


class DataParallelStrategy(SingleDeviceStrategy):
    """`torch.nn.DataParallel`: one process copies the module to its GPUs and splits each batch over them.

    It is here for code that needs it; `ddp` is faster, on one machine too. The outputs of all GPUs come back joined
    on the first one, so the loss that the loop computes is that of the whole batch.
    """

    max_devices: int | None = None
    accelerators: tuple[str, ...] | None = ("cuda",)

    @override
    def bind(self, *, precision: Precision, **kwargs: Any) -> None:
        if precision.precision == "bf16-mixed":  # by name, or as a plugin
            raise ValueError(
                "`strategy='dp'` can't run `precision='bf16-mixed'`: the threads of `torch.nn.DataParallel` take"
                " autocast's default dtype, float16. Choose 'bf16-true' or '16-mixed', or `strategy='ddp'`."
            )
        super().bind(precision=precision, **kwargs)

    @override
    def setup_module(self, module: Module) -> Module:
        return DataParallel(_Entry(module), device_ids=list(self.devices))
