# SPDX-License-Identifier: Apache-2.0
"""Context parallelism through `Fabric`: training, means, debug mode, and what it is with one rank for each sequence."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.debugging.debug_checks import _BATCH_ADVICE
from fabric.strategies import ModelParallelStrategy
from tests.debugging.jobs import debugged, error_of
from tests.ranks import run_ranks

STEPS, BATCH, LENGTH, WIDTH, TOKENS = 4, 4, 16, 24, 11


class Layer(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.split = (-1, WIDTH // heads)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (split(y).unflatten(-1, self.split).transpose(1, 2) for split in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(heads) for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if heads == 3:  # which two ranks do not divide either
            self.head.weight = self.token.weight

    def forward(self, tokens, positions):
        x = self.token(tokens) + self.position(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(heads):
    torch.manual_seed(1)
    model = Transformer(heads).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def batch(step):
    """The batch of all ranks. Not each token counts, and not equally many in each part."""
    tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    targets = torch.where(tokens[:, 1:] > 6, -100, tokens[:, 1:])
    return tokens[:, :-1], targets, torch.arange(LENGTH)


def losses_of(model, tokens, targets, positions):
    return F.cross_entropy(model(tokens, positions).transpose(1, 2), targets, reduction="none")


def plain(heads):
    """Losses, norms and final parameters of one process, in plain PyTorch."""
    model, optimizer = build(heads)
    losses, norms = [], []
    for step in range(STEPS):
        loss = losses_of(model, *batch(step)).mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def split_layers(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"layers.*.{name}": ColwiseParallel() for name in "qkv"}
    return parallelize_module(model, mesh["tensor_parallel"], {**plan, "layers.*.out": RowwiseParallel()})


def train(context, heads, sizes, backward_inside):
    strategy = ModelParallelStrategy(split_layers if "tensor_parallel_size" in sizes else None, **sizes)
    fabric = context.fabric(strategy=strategy, precision="64-true")
    model, optimizer = fabric.setup(*build(heads))
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets, positions = batch(step)
        tokens, targets = (x.chunk(strategy.data_parallel_size)[strategy.data_parallel_rank] for x in (tokens, targets))
        with fabric.context_parallel((tokens, targets, positions), (1, 1, 0)) as parts:
            assert parts[0].shape == (len(tokens), LENGTH // strategy.context_parallel_size)
            loss = losses_of(model, *parts).mean()
            if backward_inside:
                fabric.backward(loss)
        if not backward_inside:
            fabric.backward(loss)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses, norms, whole_state(model)


def whole_state(model):
    return {name: whole(value.detach()) for name, value in model.named_parameters(remove_duplicate=False)}


def whole(tensor):
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "heads", "sizes", "backward_inside"),
    [
        (2, 4, {"context_parallel_size": 2}, True),
        (2, 3, {"context_parallel_size": 2}, False),
        (4, 4, {"context_parallel_size": 4}, True),
        (4, 4, {"context_parallel_size": 2, "data_parallel_size": 2}, True),
        (4, 3, {"context_parallel_size": 2, "data_parallel_size": 1, "replicate_size": 2}, True),
        (4, 4, {"context_parallel_size": 2, "tensor_parallel_size": 2}, True),
        (2, 4, {"context_parallel_size": 2, "activation_checkpointing_policy": Layer}, True),
        (2, 4, {"context_parallel_size": 2, "cpu_offload": True}, True),
    ],
)
def test_training_equals_plain_pytorch(ranks, heads, sizes, backward_inside):
    losses, norms, state = plain(heads)
    for found in run_ranks(ranks, train, heads, sizes, backward_inside):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(norms, rel=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(found[2][name], value, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Means over tokens
# ---------------------------------------------------------------------------------------------------------------------
class Rows(TensorDataset):
    """Sequences of which not each token counts."""

    def __init__(self):
        batches = [batch(step) for step in range(STEPS)]
        super().__init__(*(torch.cat(rows) for rows in list(zip(*batches, strict=True))[:2]))


def count_tokens(batch):
    return (batch[1] != -100).sum(1)


def accumulate(context, count):
    """The gradients of one window over all rows, what was reported, and a mean over tokens."""
    strategy = ModelParallelStrategy(context_parallel_size=2)
    fabric = context.fabric(strategy=strategy, precision="64-true")
    model = fabric.setup(build(4)[0])
    loader = fabric.setup_dataloaders(DataLoader(Rows(), batch_size=2))
    window = next(iter(fabric.accumulate(loader, len(loader), count=count)))
    total = sums = counts = 0.0
    for tokens, targets in window:
        with (
            fabric.no_backward_sync(model, enabled=not window.is_last),
            fabric.context_parallel((tokens, targets, torch.arange(LENGTH)), (1, 1, 0)) as parts,
        ):
            losses = losses_of(model, *parts)
            loss = window.mean(losses if count is not None else losses.mean())
            fabric.backward(loss)
        total += loss.detach()
        sums += losses.detach().sum()
        counts += (parts[1] != -100).sum()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return gradients, fabric.all_reduce(total).item(), fabric.weighted_mean(sums, counts).item(), window.total.item()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["tokens", "samples", "micro-batches"])
def test_means_over_the_tokens_of_all_ranks(kind, ranks):
    model, _ = build(4)
    tokens, targets = Rows().tensors
    losses = losses_of(model, tokens, targets, torch.arange(LENGTH))
    by_token = losses.sum() / (targets != -100).sum()
    loss = {"tokens": by_token, "samples": losses.sum() / len(tokens), "micro-batches": losses.mean()}[kind]
    loss.backward(retain_graph=True)
    counted = {"tokens": (targets != -100).sum().item(), "samples": len(tokens), "micro-batches": 8}[kind]
    count = {"tokens": count_tokens, "samples": "samples", "micro-batches": None}[kind]
    for gradients, total, mean, window_total in run_ranks(ranks, accumulate, count):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)
        assert total == pytest.approx(loss.item(), rel=1e-12)
        assert mean == pytest.approx(by_token.item(), rel=1e-12)
        assert window_total == counted


# ---------------------------------------------------------------------------------------------------------------------
# The rest of Fabric
# ---------------------------------------------------------------------------------------------------------------------
def test_with_one_rank_for_each_sequence_nothing_happens():
    fabric = Fabric(accelerator="cpu", devices=1)
    batch = {"x": torch.arange(7)}
    with fabric.context_parallel(batch, 0) as same, fabric.context_parallel(same, 0) as again:
        assert again is same is batch
        assert torch.equal(fabric.strategy.gather_sequence(batch["x"], 0), batch["x"])
    assert fabric.strategy.context_parallel_size == 1


def one_for_each_sequence(context):
    fabric = context.fabric(strategy=ModelParallelStrategy())
    batch = {"x": torch.arange(7)}
    with fabric.context_parallel(batch, 0) as same:
        return same is batch and fabric.strategy.context_parallel_size


@pytest.mark.ranks
def test_a_mesh_without_context_ranks_divides_nothing():
    assert run_ranks(2, one_for_each_sequence) == [1, 1]


def loader_and_output(context):
    """Which rows each rank has seen, and the model's output for all tokens of the first batch."""
    strategy = ModelParallelStrategy(context_parallel_size=2)
    fabric = context.fabric(strategy=strategy, precision="64-true")
    model = fabric.setup(build(4)[0])
    loader = fabric.setup_dataloaders(DataLoader(Rows(), batch_size=4))
    batches = [tokens for tokens, _ in loader]
    with torch.no_grad(), fabric.context_parallel((batches[0], torch.arange(LENGTH)), (1, 0)) as parts:
        output = strategy.gather_sequence(model(*parts), 1)
    return torch.cat(batches), output


@pytest.mark.ranks
def test_ranks_of_one_sequence_read_the_same_rows():
    ranks = run_ranks(4, loader_and_output)
    rows = Rows().tensors[0]
    with torch.no_grad():
        for rank, (seen, output) in enumerate(ranks):
            assert torch.equal(seen, rows[rank // 2 :: 2])
            expected = build(4)[0](seen[:4], torch.arange(LENGTH))
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def enter_alike(fabric, rank):
    with fabric.context_parallel(torch.arange(8) + rank // 2, 0):
        pass


def enter_unlike(fabric, rank):
    with fabric.context_parallel(torch.arange(8) + (rank == 3), 0):
        pass


def errors_in_debug_mode(context):
    fabric = debugged(context, strategy=ModelParallelStrategy(context_parallel_size=2))
    return error_of(enter_alike, fabric), error_of(enter_unlike, fabric)


@pytest.mark.ranks
def test_debug_mode_compares_what_the_ranks_of_one_sequence_bring():
    unlike = (
        "RuntimeError: the tensors of `fabric.context_parallel` at +1: `batch` is not the same on all ranks: rank 2 |"
        f" rank 3. {_BATCH_ADVICE}"
    )
    assert run_ranks(4, errors_in_debug_mode) == [("fine", "fine")] * 2 + [("fine", unlike)] * 2


def saved(context):
    fabric = context.fabric(
        strategy=ModelParallelStrategy(context_parallel_size=2, state_dict_type="full"), precision="64-true"
    )
    fabric.save("model.pt", {"model": fabric.setup(build(3)[0])})
    return torch.load("model.pt")["model"]


@pytest.mark.ranks
def test_checkpoints_are_those_of_the_plain_model():
    expected = build(3)[0].state_dict()
    for found in run_ranks(2, saved):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def hugging_face(context):
    from transformers import LlamaConfig, LlamaForCausalLM

    fabric = context.fabric(strategy=ModelParallelStrategy(context_parallel_size=2), precision="64-true")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": TOKENS}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).double()
    tokens, _, positions = batch(0)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        model = fabric.setup(model)
        with fabric.context_parallel((tokens, positions[None]), 1) as (tokens, positions):
            found = model(input_ids=tokens, position_ids=positions).logits
    torch.testing.assert_close(fabric.strategy.gather_sequence(found, 1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_model_of_hugging_face_is_given_its_positions():
    run_ranks(2, hugging_face, timeout=120)


def wrong_lengths(context):
    fabric = context.fabric(strategy=ModelParallelStrategy(context_parallel_size=2))
    with pytest.raises(ValueError, match="evenly") as error, fabric.context_parallel(torch.arange(7), 0):
        pass
    return str(error.value)


@pytest.mark.ranks
def test_a_length_that_can_not_be_divided_raises_on_every_rank():
    text = (
        "`fabric.context_parallel(tensors, seq_dims)`: the 7 tokens of `tensors` (dimension 0) can't be divided evenly"
        " by `context_parallel_size=2`. Pad the batch to 8 tokens, or cut it to 6."
    )
    assert run_ranks(2, wrong_lengths) == [text] * 2


def half_precision(context):
    """Losses of a few steps in mixed precision, with one process and with parts of the sequences."""
    found = []
    for size in (1, 2):
        strategy = ModelParallelStrategy(context_parallel_size=size)
        fabric = context.fabric(strategy=strategy, precision="bf16-mixed")
        model, optimizer = build(4)
        model, optimizer = fabric.setup(model.float(), optimizer)
        for step in range(STEPS):
            with fabric.context_parallel(batch(step), (1, 1, 0)) as parts:  # with size 1 both ranks have all of it
                loss = losses_of(model, *parts).mean()
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(fabric.all_reduce(loss.detach()).item())
    return found


@pytest.mark.ranks
def test_mixed_precision():
    for whole_sequences, parts in run_ranks(2, half_precision):
        assert parts == pytest.approx(whole_sequences, rel=2e-2)
