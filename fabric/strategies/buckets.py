# SPDX-License-Identifier: Apache-2.0
"""Where in its buckets `DistributedDataParallel` puts each gradient, which decides in what order ranks are summed.

It puts all gradients into one bucket at first. After the first backward it makes new buckets, in the order in which the
gradients came. On three ranks or more another place means another order of summation, and so other last bits. A run
that is resumed would then differ from one that went on, by its first step.
"""

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.parallel import DistributedDataParallel


def can_settle(module: Module) -> bool:
    """Whether nothing of the user's would notice a backward: no hook on a parameter, no sparse gradient.

    Args:
        module: The user's.
    """
    if any(isinstance(part, Embedding | EmbeddingBag) and part.sparse for part in module.modules()):
        return False
    # PyTorch has no public way to ask for them.
    return not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())


def settle(ddp: DistributedDataParallel) -> None:
    """Let the new buckets be made at the first forward, whatever runs before it. Collective.

    One backward with gradients of zero, which come in the reverse order of the parameters: nearly that of a real one.

    Args:
        ddp: Around `_Entry`, with no static graph and without a search for unused parameters.
    """
    with torch.enable_grad():
        parameters: list[Tensor] = [p for p in ddp("parameters") if p.requires_grad]
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        sums = [p.flatten()[:0].sum() for p in parameters]
        torch.autograd.backward(sums, [torch.zeros_like(total) for total in sums])
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
