# SPDX-License-Identifier: Apache-2.0
"""`torch.nn.MultiheadAttention` on top of another attention function."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def multi_head_attention(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """What `torch.nn.functional.multi_head_attention_forward` computes, for what can be said of a part of a sequence.

    PyTorch's own function calls `scaled_dot_product_attention` where no `TorchFunctionMode` sees it any more, so that
    the mode that takes its place has to do the projections too.

    Args:
        attend: Takes the place of `scaled_dot_product_attention`.
        query: Of shape `(tokens, batch, features)` or `(tokens, features)`, as key and value; all other arguments are
            PyTorch's.

    Returns:
        The output, of the shape of `query`; there are no weights.

    Raises:
        NotImplementedError: For a mask other than the causal one, weights that are asked for, and added keys.
    """
    _validate(
        {
            "need_weights=True": need_weights,
            "key_padding_mask=": key_padding_mask is not None,
            "attn_mask= without is_causal=True": attn_mask is not None and not is_causal,
            "add_bias_kv=True": bias_k is not None or bias_v is not None,
            "add_zero_attn=True": add_zero_attn,
            "static_k= and static_v=": static_k is not None or static_v is not None,
        }
    )
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if in_proj_weight is not None and not use_separate_proj_weight:
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    projected = map(F.linear, (query, key, value), weights, biases)
    heads = [x.unflatten(-1, (num_heads, -1)).movedim(0, -2) for x in projected]  # (batch, heads, tokens, features)
    output = attend(*heads, dropout_p=dropout_p if training else 0.0, is_causal=is_causal)
    return F.linear(output.movedim(-2, 0).flatten(-2), out_proj_weight, out_proj_bias), None


def _validate(refused: dict[str, bool]) -> None:
    given = [name for name, is_given in refused.items() if is_given]
    if given:
        raise NotImplementedError(
            f"Inside `fabric.context_parallel(...)`, `torch.nn.MultiheadAttention` can't take `{given[0]}`, which is"
            " about the tokens of one rank only. It takes `need_weights=False`, and `is_causal=True` with any"
            " `attn_mask`. For other masks call `torch.nn.functional.scaled_dot_product_attention` yourself."
        )
