# SPDX-License-Identifier: Apache-2.0
"""`torch.nn.functional.scaled_dot_product_attention` over a sequence of which each rank has a part."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import scaled_dot_product_attention  # PyTorch's ring attention changes the name in `F`
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from typing_extensions import override

from fabric.strategies.context.exchange import gather_tokens, join_heads, split_heads
from fabric.strategies.context.multi_head import multi_head_attention
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import PossibleUserWarning

# What the function calls, which no mode takes for it: some backends of `torch.compile` run what they have traced here,
# the call of this file included, with the mode still on.
_plain_attention = torch.ops.aten.scaled_dot_product_attention
INSIDE = "Inside `fabric.context_parallel(...)`"
# Attention that goes past `scaled_dot_product_attention`, as its calls show here: it would see one rank's tokens only.
_REFUSED = ("flex_attention", "_varlen_attn")


class WholeAttention(TorchFunctionMode):
    """Takes the calls of `scaled_dot_product_attention` in this thread, wherever they come from.

    Each rank has the same number of neighbouring tokens, in the order of ranks. Each call takes one of two ways:

    - Where the ranks divide the numbers of heads and no mask is given, each rank gets some heads of all tokens in
      exchange for the other heads of its own ("Ulysses", https://arxiv.org/abs/2309.14509): it sends each of query,
      key, value and output once.
    - Otherwise key and value of all tokens go to all ranks, and each attends from its own queries. Of a causal mask it
      takes its own rows. A mask that is given has the rows of the rank's queries and the columns of all keys.

    Args:
        group: The ranks, in the order of the sequence.
        length: Tokens of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, length: int) -> None:
        super().__init__()
        self._group = group
        self._length = length
        self._has_warned = False
        self._handlers: dict[Any, Callable[..., Any]] = {
            scaled_dot_product_attention: self.attend,
            F.multi_head_attention_forward: self._attend_with_projections,
            Tensor.backward: self._backward,
            torch.arange: self._count,
        }

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if getattr(func, "__name__", None) in _REFUSED:
            raise NotImplementedError(
                f"{INSIDE}, `{func.__name__}` would attend to the tokens of one rank only. Call"
                " `torch.nn.functional.scaled_dot_product_attention`, which sees the whole sequence."
            )
        return func(*args, **(kwargs or {}))

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
        """Attend from this rank's queries to all keys; the arguments are PyTorch's, for this rank's tokens.

        Raises:
            ValueError: If the shapes say that something else than parts of the sequence was given.
            NotImplementedError: For tensors that are not plain.
        """
        self._validate(query, key, value, attn_mask, is_causal)
        _validate_recomputing()
        query, key, value = map(_as_autocast_does, (query, key, value))
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if attn_mask is None and all(self._splits_heads(tensor) for tensor in (query, key, value)):
            query, key, value = split_heads([query, key, value], self._group)
            return join_heads(_plain_attention(query, key, value, is_causal=is_causal, **options), self._group)
        key, value = gather_tokens([key, value], self._group)
        if is_causal and attn_mask is None:
            before = self._group.rank() * query.size(-2)
            key, value = (tensor[..., : before + query.size(-2), :] for tensor in (key, value))
            shape = query.size(-2), key.size(-2)
            attn_mask, is_causal = torch.ones(shape, dtype=torch.bool, device=query.device).tril(before), False
        output: Tensor = _plain_attention(query, key, value, attn_mask, is_causal=is_causal, **options)
        return output

    def _splits_heads(self, tensor: Tensor) -> bool:
        return tensor.dim() > 2 and tensor.size(-3) % self._group.size() == 0

    def _validate(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
        tensors = (query, key, value)
        unusual = next((tensor for tensor in tensors if tensor.is_nested or _is_dtensor(tensor)), None)
        if unusual is not None:
            kind = "nested tensors" if unusual.is_nested else "a `DTensor`"
            raise NotImplementedError(
                f"{INSIDE}, `scaled_dot_product_attention` takes plain tensors with this rank's tokens, and got {kind}."
                " Pad nested tensors; let tensor-parallel layers return plain ones (`use_local_output=True`)."
            )
        if len({tensor.dtype for tensor in map(_as_autocast_does, tensors)}) > 1:
            raise ValueError(
                f"{INSIDE}, `scaled_dot_product_attention` got {', '.join(str(tensor.dtype) for tensor in tensors)}."
                " Give query, key and value one dtype."
            )
        tokens, keys = query.size(-2), key.size(-2)
        if tokens > self._length and tokens % self._length:
            raise ValueError(
                f"{INSIDE}, each rank has {self._length} tokens, but `scaled_dot_product_attention` got {tokens}"
                " queries. Tokens that a model adds to its input would be there once for each rank: add them to the"
                " batch, before it is divided."
            )
        if is_causal and tokens != keys:
            raise ValueError(
                f"{INSIDE}, `is_causal=True` is for as many queries as keys on each rank, and there are {tokens} and"
                f" {keys}. Pass `attn_mask=` with a row for each of this rank's queries and a column for each of all"
                f" {keys * self._group.size()} keys."
            )
        if attn_mask is not None:
            self._validate_mask(attn_mask, tokens, keys * self._group.size())

    def _validate_mask(self, mask: Tensor, queries: int, keys: int) -> None:
        if mask.dim() < 2 or mask.size(-1) != keys or mask.size(-2) not in (1, queries):
            raise ValueError(
                f"{INSIDE}, `attn_mask` has a row for each of this rank's {queries} queries (or one for all) and a"
                f" column for each of the {keys} keys of all ranks, but its shape is {tuple(mask.shape)}."
                " Build it for the whole sequence and divide its rows: give it to `fabric.context_parallel` with the"
                " dimension -2. For a plain causal mask, `is_causal=True` does all that."
            )

    def _attend_with_projections(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return multi_head_attention(self.attend, *args, **kwargs)

    def _backward(
        self,
        tensor: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """`Tensor.backward`: no mode is on in what a mode calls, but a checkpoint's second forward there needs it.

        So backward begins at the tensor's place in the graph, which is no tensor, and does not ask the mode again.
        """
        if tensor.grad_fn is None or inputs is not None or type(tensor) is not Tensor:
            tensor.backward(gradient, retain_graph, create_graph, inputs)
            return
        with self:
            torch.autograd.backward(get_gradient_edge(tensor), gradient, retain_graph, create_graph)

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        """`torch.arange`: a model that numbers its tokens itself begins with 0 on every rank."""
        if args in ((self._length,), (0, self._length)) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{INSIDE}, each rank has {self._length} tokens of the sequence, and `torch.arange({self._length})` was"
                " called. Positions that are made so begin with 0 on every rank. Number the tokens before:"
                " `with fabric.context_parallel((x, torch.arange(length)), (1, 0)) as (x, positions):`.",
                PossibleUserWarning,
                stacklevel=3,
            )
        return torch.arange(*args, **kwargs)


def _validate_recomputing() -> None:
    """Backward may compute again outside of the block what ran here, and only the other kind of checkpoint notices."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise NotImplementedError(
                f"{INSIDE}, `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` can't be used."
                " Pass `use_reentrant=False`."
            )
        frame = frame.f_back


def _is_dtensor(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _as_autocast_does(tensor: Tensor) -> Tensor:
    """Autocast converts what attention is given; done before it is sent, less is sent."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor
