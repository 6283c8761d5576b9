# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own context parallelism: ring attention, on CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fabric.strategies.context.attention import INSIDE, WholeAttention, _validate_recomputing
from fabric.strategies.context.context import ContextParallel
from fabric.strategies.context.sequences import CALL, Sequenced

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class RingContext(ContextParallel):
    """`torch.distributed.tensor.experimental.context_parallel`, in whose block backward has to run too.

    PyTorch balances the work of causal attention: where `2 * ranks` divides the length, rank r has the parts r and
    `2 * ranks - 1 - r` of so many. So the tokens of a rank are no neighbours, and positions must be divided with them.

    Args:
        mesh: The ranks that share the sequence, of one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh.get_group())
        self._mesh = mesh

    @override
    @contextmanager
    def _attend(self, sequences: Sequence[Sequenced]) -> Iterator[list[Tensor]]:
        from torch.distributed.tensor.experimental import context_parallel

        _validate_gradients(sequences)
        parts = [each.tensor.clone() for each in sequences]  # it divides in place
        dims = [each.dim or 0 for each in sequences]
        attention = _RingAttention(self._group, sequences[0].length // self._group.size())
        divided = context_parallel(self._mesh, buffers=parts, buffer_seq_dims=dims, no_restore_buffers=set(parts))
        with divided, attention:
            yield parts

    @override
    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        # The package `torch.distributed.tensor.experimental` does not export it, though its own tutorial uses it.
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard

        rows = tensor.detach().movedim(dim, 0).unsqueeze(0)  # it wants a batch dimension before that of the sequence
        (whole,) = context_parallel_unshard(self._mesh, [rows], [1])
        return whole.squeeze(0).movedim(0, dim)


class _RingAttention(WholeAttention):
    """Hands causal attention on to PyTorch's, and does what that can't."""

    @override
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        query, key, value = map(self._own_part, (query, key, value))
        _validate_ring(query, attn_mask, dropout_p, is_causal)
        if not is_causal:  # the order of the tokens does not matter then
            return super().attend(query, key, value, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
        self._validate(query, key, value, attn_mask, is_causal)
        _validate_recomputing()
        if enable_gqa:
            key, value = (tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3) for tensor in (key, value))
        # Inside of PyTorch's block this name is its own function, also for those who hold the one of before.
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)

    def _own_part(self, tensor: Tensor) -> Tensor:
        """PyTorch's function has made `DTensor`s over the sequence of what the model called it with."""
        from torch.distributed.tensor import DTensor, Shard

        over_sequence = isinstance(tensor, DTensor) and tensor.placements == (Shard(2),)
        return tensor.to_local() if over_sequence else tensor  # type: ignore[attr-defined]  # see above


def _validate_gradients(sequences: Sequence[Sequenced]) -> None:
    for each in sequences:
        if each.tensor.requires_grad:
            raise ValueError(
                f"{CALL}: `{each.name}` requires gradients, and PyTorch divides tensors in place on this device."
                " Divide what it was made of instead, and make it inside."
            )


def _validate_ring(query: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool) -> None:
    refused: dict[str, Any] = {
        "attn_mask=": mask is not None,
        "dropout_p= together with is_causal=True": is_causal and dropout_p > 0,
        "is_causal=True for a query that is not of shape (batch, heads, tokens, features)": is_causal
        and query.dim() != 4,
    }
    given = [name for name, is_given in refused.items() if is_given]
    if given:
        raise NotImplementedError(
            f"{INSIDE} on CUDA, `scaled_dot_product_attention` can't take `{given[0]}`: there is `is_causal=True`"
            " without a mask and without dropout, and attention to all tokens. Use dropout on what attention returns,"
            " or choose `context_parallel_method='exchange'`."
        )
