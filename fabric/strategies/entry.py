# SPDX-License-Identifier: Apache-2.0
"""The small module that PyTorch's wrappers are given in place of the user's."""

from typing import Any

from torch.nn import Module


class _Entry(Module):
    """Lets any method of the user's module go through a wrapper's forward, with nothing set on the user's objects.

    `DistributedDataParallel(_Entry(module))("training_step", batch)` calls `module.training_step(batch)` between what
    the wrapper does before and after a forward.
    """

    def __init__(self, inner: Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module itself for `forward` (its hooks run), or the method of that name."""
        return self.inner(*args, **kwargs) if method == "forward" else getattr(self.inner, method)(*args, **kwargs)
