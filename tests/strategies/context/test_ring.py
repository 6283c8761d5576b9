# SPDX-License-Identifier: Apache-2.0
"""What of PyTorch's context parallelism runs on a CPU: all but the ring attention itself."""

import re

import pytest
import torch
import torch.nn.functional as F

from fabric.strategies.context import ExchangingContext, RingContext, create_context, validated_method
from tests.ranks import run_ranks

ATTENTION = F.scaled_dot_product_attention


def mesh_of(context):
    from torch.distributed.device_mesh import init_device_mesh

    context.process_group()
    return init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("context_parallel",))


def divided(context):
    ring = RingContext(mesh_of(context))
    tokens, positions = torch.arange(16).view(2, 8), torch.arange(8)
    with ring.divide({"x": tokens, "p": positions, "whole": tokens}, {"x": -1, "p": 0, "whole": None}) as parts:
        assert F.scaled_dot_product_attention is not ATTENTION
        gathered = ring.gather(parts["x"], 1), ring.gather(parts["p"], 0), ring.gather(parts["x"].T.float(), -2)
    assert F.scaled_dot_product_attention is ATTENTION
    assert torch.equal(gathered[0], tokens)
    assert torch.equal(gathered[1], positions)
    assert torch.equal(gathered[2], tokens.T.float())
    assert torch.equal(parts["whole"], tokens)
    assert torch.equal(tokens, torch.arange(16).view(2, 8))
    return parts["x"].tolist(), parts["p"].tolist()


@pytest.mark.ranks
def test_tokens_and_positions_are_balanced_alike_and_gathered_in_order():
    assert run_ranks(2, divided) == [
        ([[0, 1, 6, 7], [8, 9, 14, 15]], [0, 1, 6, 7]),
        ([[2, 3, 4, 5], [10, 11, 12, 13]], [2, 3, 4, 5]),
    ]


def odd_parts(context):
    """6 tokens can't be divided by 4, so they are not balanced, and gathering knows that."""
    ring = RingContext(mesh_of(context))
    with ring.divide(torch.arange(6), 0) as part:
        assert torch.equal(ring.gather(part, 0), torch.arange(6))
    return part.tolist()


@pytest.mark.ranks
def test_what_can_not_be_balanced_is_divided_in_order():
    assert run_ranks(2, odd_parts) == [[0, 1, 2], [3, 4, 5]]


def attention_without_a_mask(context):
    ring = RingContext(mesh_of(context))
    q, k, v = torch.randn(3, 2, 4, 8, 16, dtype=torch.float64)
    expected = ATTENTION(q, k, v)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    ATTENTION(*leaves).square().sum().backward()
    with ring.divide((q, k, v, *(leaf.grad for leaf in leaves)), 2) as (q, k, v, *gradients):
        own = [tensor.requires_grad_() for tensor in (q, k, v)]
        outputs = [attend(*own) for attend in (F.scaled_dot_product_attention, ATTENTION)]  # before and inside
        outputs[0].square().sum().backward()
    for output in outputs:
        torch.testing.assert_close(ring.gather(output, 2), expected, rtol=1e-12, atol=1e-12)
    for leaf, gradient in zip(own, gradients, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks
def test_attention_without_a_mask_is_right_in_any_order():
    run_ranks(2, attention_without_a_mask)


def messages(context):
    """Of each call that the ring can't do."""
    ring = RingContext(mesh_of(context))
    q = torch.randn(2, 4, 8, 16)
    calls = {
        "mask": lambda q: F.scaled_dot_product_attention(q, q, q, torch.ones(1, 1, 4, 8, dtype=torch.bool)),
        "dropout": lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True),
        "shape": lambda q: ATTENTION(q[0], q[0], q[0], is_causal=True),
        "before": lambda q: ATTENTION(q, q, q, dropout_p=0.1, is_causal=True),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(NotImplementedError) as error, ring.divide(q, 2) as part:
            call(part)
        found[name] = str(error.value)
        assert F.scaled_dot_product_attention is ATTENTION
    with (
        pytest.raises(ValueError, match="gradients") as error,
        ring.divide((q, torch.zeros_like(q, requires_grad=True)), 2),
    ):
        pass
    return {**found, "gradients": str(error.value)}


@pytest.mark.ranks
def test_what_the_ring_can_not_do_raises():
    ranks = run_ranks(2, messages)
    assert ranks[0] == ranks[1]
    refused = {
        "mask": "attn_mask=",
        "dropout": "dropout_p= together with is_causal=True",
        "shape": "is_causal=True for a query that is not of shape (batch, heads, tokens, features)",
        "before": "dropout_p= together with is_causal=True",
    }
    for name, text in refused.items():
        assert ranks[0][name] == (
            f"Inside `fabric.context_parallel(...)` on CUDA, `scaled_dot_product_attention` can't take `{text}`:"
            " there is `is_causal=True` without a mask and without dropout, and attention to all tokens. Use dropout on"
            " what attention returns, or choose `context_parallel_method='exchange'`."
        )
    assert ranks[0]["gradients"] == (
        "`fabric.context_parallel(tensors, seq_dims)`: `tensors[1]` requires gradients, and PyTorch divides tensors in"
        " place on this device. Divide what it was made of instead, and make it inside."
    )


def created(context):
    mesh = mesh_of(context)
    assert type(create_context(mesh)) is type(create_context(mesh, "exchange")) is ExchangingContext
    with pytest.raises(ValueError, match="ring") as error:
        create_context(mesh, "ring")
    return str(error.value)


@pytest.mark.ranks
def test_the_device_says_which_it_is():
    assert run_ranks(1, created) == [
        "`context_parallel_method='ring'` needs CUDA, and this run uses cpu. Leave it out, or choose 'exchange'."
    ]


def test_an_unknown_method_raises():
    text = (
        "`ModelParallelStrategy(context_parallel_method='rign')` is not a way to attend over ranks."
        " Choose 'exchange' (of heads or keys, on any device), 'ring' (PyTorch's ring attention, on CUDA), or 'auto':"
        " 'ring' on CUDA."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        validated_method("ModelParallelStrategy", "rign")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_causal_ring_attention_equals_one_process(tmp_path):
    torch.multiprocessing.spawn(on_cuda, (str(tmp_path / "store"),), nprocs=2)


def on_cuda(rank, store):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    ring = create_context(init_device_mesh("cuda", (2,), mesh_dim_names=("context_parallel",)))
    assert isinstance(ring, RingContext)
    whole = [tensor.requires_grad_() for tensor in torch.randn(3, 2, 4, 64, 32, dtype=torch.bfloat16, device="cuda")]
    output = ATTENTION(*whole, is_causal=True)
    output.float().square().sum().backward()
    with ring.divide([tensor.detach() for tensor in whole], 2) as parts:
        own = ATTENTION(*(part.requires_grad_() for part in parts), is_causal=True)
        own.float().square().sum().backward()
        torch.testing.assert_close(ring.gather(own, 2), output.detach(), rtol=2e-2, atol=2e-2)
        for part, tensor in zip(parts, whole, strict=True):
            torch.testing.assert_close(ring.gather(part.grad, 2), tensor.grad, rtol=5e-2, atol=5e-2)
    dist.destroy_process_group()
