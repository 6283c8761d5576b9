# SPDX-License-Identifier: Apache-2.0
"""Neighbouring tokens on each rank, and attention by exchanging heads or gathering keys; on any device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from fabric.strategies.context.attention import WholeAttention
from fabric.strategies.context.context import ContextParallel
from fabric.strategies.context.exchange import gather_tokens
from fabric.strategies.context.sequences import Sequenced


class ExchangingContext(ContextParallel):
    """Rank r has the tokens from `r * length / ranks` on; see `WholeAttention`.

    Gradients flow to the user's tensors, and backward may run inside or outside of the block.
    """

    @override
    @contextmanager
    def _attend(self, sequences: Sequence[Sequenced]) -> Iterator[list[Tensor]]:
        length = sequences[0].length // self._group.size()
        start = self._group.rank() * length
        # clones, so that what is done in place to a part is not done to the user's tensor
        parts = [each.tensor.narrow(each.dim or 0, start, length).clone() for each in sequences]
        with WholeAttention(self._group, length):
            yield parts

    @override
    @torch.no_grad()
    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        ahead = tensor.movedim(dim, 0)
        (whole,) = gather_tokens([ahead.reshape(len(ahead), -1)], self._group)
        return whole.reshape(-1, *ahead.shape[1:]).movedim(0, dim)
