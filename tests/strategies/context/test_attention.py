# SPDX-License-Identifier: Apache-2.0
"""Attention over a divided sequence against plain PyTorch on the whole one: output, gradients, masks, errors."""

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from fabric.strategies.context import ExchangingContext
from fabric.utilities.warnings import PossibleUserWarning
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

LENGTH = 12


@dataclass(frozen=True)
class Case:
    """One call, in one process; `masked` gives it a mask of random holes."""

    heads: int = 4
    kv_heads: int = 4
    causal: bool = True
    masked: bool = False
    keys: int = LENGTH
    value_size: int = 8
    leading: tuple[int, ...] = (2,)
    scale: float | None = None
    dtype: torch.dtype = torch.float64


CASES = {
    "heads": Case(),
    "heads, not causal": Case(causal=False),
    "heads, another scale and size of values": Case(scale=0.5, value_size=6),
    "heads, more leading dimensions": Case(leading=(2, 3)),
    "three dimensions": Case(leading=()),
    "keys": Case(heads=3, kv_heads=3),
    "keys, not causal": Case(heads=3, kv_heads=3, causal=False),
    "grouped heads": Case(heads=8, kv_heads=4),
    "grouped heads that the ranks do not divide": Case(heads=6, kv_heads=3),
    "one head of keys": Case(heads=4, kv_heads=1),
    "mask": Case(causal=False, masked=True),
    "cross": Case(causal=False, keys=20),
    "cross, with a mask": Case(causal=False, masked=True, keys=20),
    "float32": Case(dtype=torch.float32),
    "bfloat16": Case(dtype=torch.bfloat16),
    "bfloat16, keys": Case(heads=3, kv_heads=3, dtype=torch.bfloat16),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def whole_tensors(case):
    generator = torch.Generator().manual_seed(5)
    shapes = (
        (*case.leading, case.heads, LENGTH, 8),
        (*case.leading, case.kv_heads, case.keys, 8),
        (*case.leading, case.kv_heads, case.keys, case.value_size),
        (*case.leading, case.heads, LENGTH, case.value_size),  # the gradient of the output
    )
    q, k, v, gradient = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
    mask = torch.rand(LENGTH, case.keys, generator=generator) < 0.7
    mask[:, 0] = True
    return [tensor.to(case.dtype) for tensor in (q, k, v, gradient)], mask if case.masked else None


def attention(case, q, k, v, mask):
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=case.causal, scale=case.scale, enable_gqa=case.heads != case.kv_heads
    )


def part(tensor, rank, ranks, dim=-2):
    return tensor.chunk(ranks, dim)[rank]


def expected_parts(case, ranks):
    """For each rank: output and the gradients of query, key and value."""
    (q, k, v, gradient), mask = whole_tensors(case)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    output = attention(case, *leaves, mask)
    output.backward(gradient)
    return [[part(x, rank, ranks) for x in (output.detach(), q.grad, k.grad, v.grad)] for rank in range(ranks)]


def divided(context, case, backward_inside):
    context.process_group()
    tensors, mask = whole_tensors(case)
    if mask is not None:
        mask = part(mask, context.rank, context.world_size)
    q, k, v, gradient = (part(tensor, context.rank, context.world_size) for tensor in tensors)
    leaves = [tensor.contiguous().requires_grad_() for tensor in (q, k, v)]
    with ExchangingContext(dist.group.WORLD).divide(torch.zeros(LENGTH), 0):
        output = attention(case, *leaves, mask)
        if backward_inside:
            output.backward(gradient)
    if not backward_inside:
        output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, ranks):
    case = CASES[name]
    for found, expected in zip(
        run_ranks(ranks, divided, case, backward_inside=name != "keys"), expected_parts(case, ranks), strict=True
    ):
        for own, other in zip(found, expected, strict=True):
            assert own.dtype == other.dtype
            torch.testing.assert_close(own, other, rtol=TOLERANCES[case.dtype], atol=TOLERANCES[case.dtype])


# ---------------------------------------------------------------------------------------------------------------------
# Modules: each function below gets the context of its ranks, and compares with the module on the whole sequence
# ---------------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(12, 36, dtype=torch.float64)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def start(context):
    context.process_group()
    torch.manual_seed(1)
    return ExchangingContext(dist.group.WORLD), torch.randn(2, LENGTH, 12, dtype=torch.float64)


def gradients(module, output):
    """Of the sum over all ranks of what their tokens give."""
    module.zero_grad()
    output.square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def summed(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def with_autocast(context):
    divided, x = start(context)
    for heads in (4, 3):
        block = Block(heads).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = block(x.float())
            with divided.divide(x.float(), 1) as part:
                found = block(part)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(divided.gather(found, 1), expected, rtol=2e-2, atol=2e-2)


def with_checkpoint(context):
    divided, x = start(context)
    for heads in (4, 3):
        block = Block(heads)
        expected = gradients(block, block(x))
        with divided.divide(x, 1) as part:
            assert_close(summed(gradients(block, checkpoint(block, part, use_reentrant=False))), expected)
            with pytest.raises(NotImplementedError) as error:
                checkpoint(block, part.requires_grad_(), use_reentrant=True)
            output = checkpoint(block, part, use_reentrant=False)
        with pytest.raises(CheckpointError):  # not the gradients of attention in each part
            output.sum().backward()
    assert str(error.value) == (
        "Inside `fabric.context_parallel(...)`, `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` can't be"
        " used. Pass `use_reentrant=False`."
    )


def with_all_ways_to_run_backward(context):
    divided, x = start(context)
    block = Block(4)
    expected = gradients(block, block(x))
    with divided.divide(x, 1) as part:
        outputs = [block(part) for _ in range(4)]
        for index, backward in enumerate(
            (
                lambda loss: loss.backward(),
                lambda loss: loss.backward(torch.ones_like(loss), retain_graph=True),
                lambda loss: loss.backward(inputs=list(block.parameters())),
                lambda loss: torch.autograd.backward(loss),
            )
        ):
            block.zero_grad()
            backward(outputs[index].square().sum())
            assert_close(summed([parameter.grad for parameter in block.parameters()]), expected)
        with pytest.raises(RuntimeError, match="does not require grad"):
            x.sum().backward()


def with_compile(context):
    divided, x = start(context)
    for heads in (4, 3):
        block = Block(heads)
        expected = gradients(block, block(x))
        for backend in ("aot_eager", "eager"):
            compiled = torch.compile(block, backend=backend, fullgraph=True)
            with warnings.catch_warnings():
                # PyTorch makes an object of what should be none when it traces any function of autograd.
                warnings.filterwarnings("ignore", message=".* should not be instantiated")
                for _ in range(2):
                    with divided.divide(x, 1) as part:
                        assert_close(summed(gradients(block, compiled(part))), expected)
            assert_close(compiled(x), block(x))


def with_torch_modules(context):
    divided, x = start(context)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH // context.world_size).double()
    whole_mask = nn.Transformer.generate_square_subsequent_mask(LENGTH).double()
    for heads in (4, 3):
        layer = nn.TransformerEncoderLayer(12, heads, 16, dropout=0.1, batch_first=True, dtype=torch.float64).eval()
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        separate = nn.MultiheadAttention(12, heads, kdim=12, vdim=6, bias=False, dtype=torch.float64)
        with torch.no_grad():
            expected = layer(x), encoder(x, whole_mask, is_causal=True)
            with divided.divide(x, 1) as part:
                found = layer(part), encoder(part, mask, is_causal=True)
            expected += (separate(x[0], x[0], x[0, :, :6], need_weights=False)[0],)
            with divided.divide(x[0], 0) as part:
                found += (separate(part, part, part[:, :6], need_weights=False)[0],)
        for own, other, dim in zip(found, expected, (1, 1, 0), strict=True):
            assert_close(divided.gather(own, dim), other)
        layer.train()
        layer.dropout.p = layer.dropout1.p = layer.dropout2.p = layer.self_attn.dropout = 0.0
        expected = gradients(layer, layer(x))
        with divided.divide(x, 1) as part:
            assert_close(summed(gradients(layer, layer(part))), expected)


def with_dropout(context):
    divided, _ = start(context)
    for heads in (4, 3):
        q, ones = torch.randn(8, heads, LENGTH, 4), torch.ones(8, heads, LENGTH, 4)
        with divided.divide((q, ones), 2) as (q, ones):
            output = F.scaled_dot_product_attention(q, q, ones, dropout_p=0.5)
        assert abs(output.mean() - 1) < 0.1
        assert output.std() > 0.1


@pytest.mark.parametrize(
    "function",
    [
        with_autocast,
        with_checkpoint,
        with_all_ways_to_run_backward,
        with_compile,
        with_torch_modules,
        with_dropout,
    ],
)
def test_modules(function):
    run_ranks(2, function, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# The block
# ---------------------------------------------------------------------------------------------------------------------
def the_users_tensors(context):
    divided, x = start(context)
    kept, x = x.clone(), x.requires_grad_()
    with divided.divide(x, 1) as part:
        part.sum().backward()
        part.detach().zero_()
    assert torch.equal(x, kept)
    own = torch.zeros_like(x).chunk(2, 1)[context.rank].shape
    assert torch.equal(x.grad.chunk(2, 1)[context.rank], torch.ones(own, dtype=x.dtype))
    assert x.grad.sum() == x.numel() / 2
    numbers = torch.arange(24).view(2, 12)
    for whole in (numbers, numbers.bool(), numbers.to(torch.bfloat16), numbers.T, numbers[0]):
        dim = list(whole.shape).index(12)
        with divided.divide(whole, dim) as part:
            assert torch.equal(part, whole.chunk(2, dim)[context.rank])
            assert torch.equal(divided.gather(part, dim), whole)
            assert torch.equal(divided.gather(part, dim - whole.dim()), whole)


def test_the_users_tensors_stay_and_get_gradients():
    run_ranks(2, the_users_tensors)


def what_is_left(context):
    divided, x = start(context)
    block = Block(4)
    plain = block(x)
    with pytest.raises(ZeroDivisionError), divided.divide(x, 1):
        raise ZeroDivisionError
    assert torch.equal(block(x), plain)
    with divided.divide(x, 1) as part:
        whole = block(part)
        with pytest.raises(RuntimeError) as error, divided.divide(part, 1):
            pass
        assert torch.equal(block(part), whole)
    with pytest.raises(ValueError, match="can't be divided"), divided.divide(x[:, :3], 1):
        pass
    with divided.divide(x, 1) as part:
        assert torch.equal(block(part), whole)
    return str(error.value)


def test_the_block_ends_also_after_an_error_and_is_not_entered_twice():
    text = (
        "`fabric.context_parallel(tensors, seq_dims)` was called inside of such a block. The sequence is divided there"
        " already: leave that block first, or give all tensors to the outer one."
    )
    assert run_ranks(2, what_is_left) == [text] * 2


def counted(context):
    divided, x = start(context)
    with warnings.catch_warnings(record=True) as seen, divided.divide(x, 1):
        warnings.simplefilter("always")
        torch.arange(LENGTH)
        torch.arange(1, LENGTH // 2)
        for _ in range(2):
            assert torch.equal(torch.arange(0, LENGTH // 2), torch.tensor(range(6)))
    assert all(warning.category is PossibleUserWarning for warning in seen)
    return [(str(warning.message), warning.filename == __file__) for warning in seen]


def test_a_model_that_numbers_its_own_tokens_is_warned_of():
    text = (
        "Inside `fabric.context_parallel(...)`, each rank has 6 tokens of the sequence, and `torch.arange(6)` was"
        " called. Positions that are made so begin with 0 on every rank. Number the tokens before: `with"
        " fabric.context_parallel((x, torch.arange(length)), (1, 0)) as (x, positions):`."
    )
    assert run_ranks(2, counted) == [[(text, True)], []]


CALLS = {
    "causal": lambda q: F.scaled_dot_product_attention(q, q[..., :4, :], q[..., :4, :], is_causal=True),
    "added": lambda q: F.scaled_dot_product_attention(F.pad(q, (0, 0, 1, 0)), q, q),
    "mask": lambda q: F.scaled_dot_product_attention(q, q, q, torch.ones(6, 6)),
    "rows": lambda q: F.scaled_dot_product_attention(q, q, q, torch.ones(12, 12)),
    "dtype": lambda q: F.scaled_dot_product_attention(q, q, q.double()),
    "nested": lambda q: F.scaled_dot_product_attention(*[torch.nested.as_nested_tensor([q[0], q[1]])] * 3),
    "weights": lambda q: nn.MultiheadAttention(8, 2)(q[0], q[0], q[0]),
    "padding": lambda q: nn.MultiheadAttention(8, 2)(
        q[0], q[0], q[0], need_weights=False, key_padding_mask=torch.zeros(4, 6, dtype=torch.bool)
    ),
}
MESSAGES = {
    "causal": "Inside `fabric.context_parallel(...)`, `is_causal=True` is for as many queries as keys on each rank, and"
    " there are 6 and 4. Pass `attn_mask=` with a row for each of this rank's queries and a column for each of all 8"
    " keys.",
    "added": "Inside `fabric.context_parallel(...)`, each rank has 6 tokens, but `scaled_dot_product_attention` got 7"
    " queries. Tokens that a model adds to its input would be there once for each rank: add them to the batch, before"
    " it is divided.",
    "mask": "Inside `fabric.context_parallel(...)`, `attn_mask` has a row for each of this rank's 6 queries (or one for"
    " all) and a column for each of the 12 keys of all ranks, but its shape is (6, 6). Build it for the whole sequence"
    " and divide its rows: give it to `fabric.context_parallel` with the dimension -2. For a plain causal mask,"
    " `is_causal=True` does all that.",
    "rows": "Inside `fabric.context_parallel(...)`, `attn_mask` has a row for each of this rank's 6 queries (or one for"
    " all) and a column for each of the 12 keys of all ranks, but its shape is (12, 12). Build it for the whole"
    " sequence and divide its rows: give it to `fabric.context_parallel` with the dimension -2. For a plain causal"
    " mask, `is_causal=True` does all that.",
    "dtype": "Inside `fabric.context_parallel(...)`, `scaled_dot_product_attention` got torch.float32, torch.float32,"
    " torch.float64. Give query, key and value one dtype.",
    "nested": "Inside `fabric.context_parallel(...)`, `scaled_dot_product_attention` takes plain tensors with this"
    " rank's tokens, and got nested tensors. Pad nested tensors; let tensor-parallel layers return plain ones"
    " (`use_local_output=True`).",
    "weights": "Inside `fabric.context_parallel(...)`, `torch.nn.MultiheadAttention` can't take `need_weights=True`,"
    " which is about the tokens of one rank only. It takes `need_weights=False`, and `is_causal=True` with any"
    " `attn_mask`. For other masks call `torch.nn.functional.scaled_dot_product_attention` yourself.",
    "padding": "Inside `fabric.context_parallel(...)`, `torch.nn.MultiheadAttention` can't take `key_padding_mask=`,"
    " which is about the tokens of one rank only. It takes `need_weights=False`, and `is_causal=True` with any"
    " `attn_mask`. For other masks call `torch.nn.functional.scaled_dot_product_attention` yourself.",
}


def messages(context):
    divided, _ = start(context)
    found = {}
    with warnings.catch_warnings(), divided.divide(torch.randn(2, 4, LENGTH, 8), 2) as q:
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
        for name, call in CALLS.items():
            with pytest.raises((ValueError, NotImplementedError)) as error:
                call(q)
            found[name] = str(error.value)
    return found


def test_what_can_not_be_right_raises_on_every_rank():
    assert run_ranks(2, messages) == [MESSAGES] * 2


def refused(context):
    from torch._dynamo.exc import Unsupported
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.attention.varlen import varlen_attn

    divided, _ = start(context)
    with warnings.catch_warnings(), divided.divide(torch.randn(2, 4, LENGTH, 16), 2) as q:
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        with pytest.raises(Unsupported) as flex:
            flex_attention(q, q, q)
        ends = torch.tensor([0, 6], dtype=torch.int32)
        with pytest.raises(NotImplementedError) as varlen:
            varlen_attn(*[q[0].transpose(0, 1)] * 3, ends, ends, 6, 6)
    return str(flex.value), str(varlen.value)


def test_attention_past_the_function_raises():
    text = (
        "Inside `fabric.context_parallel(...)`, `{}` would attend to the tokens of one rank only. Call"
        " `torch.nn.functional.scaled_dot_product_attention`, which sees the whole sequence."
    )
    for flex, varlen in run_ranks(2, refused):
        assert text.format("flex_attention") in flex  # PyTorch compiles it, and wraps what it meets
        assert varlen == text.format("_varlen_attn")
