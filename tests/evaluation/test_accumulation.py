# SPDX-License-Identifier: Apache-2.0
"""Accumulated gradients against one process that sees each window as one big batch, and knows nothing of Fabric."""

import copy
import re
import weakref

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric
from tests.ranks import run_ranks

STEPS = 4
VOCABULARY, IGNORED = 5, -100


@pytest.fixture(autouse=True)
def _one_thread():
    """As on the ranks: the order of sums depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Texts(Dataset):
    """Of unlike lengths, of which a part counts; those of some samples not at all."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(1, 9, (), generator=generator))
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = torch.randint(VOCABULARY, (length,), generator=generator)
        labels[torch.rand(length, generator=generator) < 0.3] = IGNORED
        if index % 7 == 3:
            labels[:] = IGNORED
        return tokens, labels


def padded(samples):
    longest = max(len(tokens) for tokens, _ in samples)
    batch = torch.zeros(len(samples), longest, dtype=torch.int64), torch.full((len(samples), longest), IGNORED)
    for row, (tokens, labels) in enumerate(samples):
        batch[0][row, : len(tokens)], batch[1][row, : len(labels)] = tokens, labels
    return batch


def build():
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, VOCABULARY)
    ).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def losses_of(model, batch):
    return cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none", ignore_index=IGNORED)


def tokens_by_sample(batch):
    return (batch[1] != IGNORED).sum(1)


def tokens(batch):
    return int((batch[1] != IGNORED).sum())


def sample_losses(model, batch):
    return losses_of(model, batch).sum(1)


# For each recipe: the argument `count`, and the losses that `mean` is given.
RECIPES = {
    "tokens of samples": (tokens_by_sample, losses_of),
    "tokens": (tokens, lambda model, batch: losses_of(model, batch).sum()),
    "samples": ("samples", sample_losses),
    "micro-batches": (None, lambda model, batch: sample_losses(model, batch).mean()),
}


def train(context, items, batch_size, recipe):
    fabric = context.fabric(strategy="ddp" if context.world_size > 1 else "auto")
    loader = fabric.setup_dataloaders(DataLoader(Texts(items), batch_size=batch_size, collate_fn=padded))
    model, optimizer = fabric.setup(*build())
    count, losses = RECIPES[recipe]
    gradients, lengths, totals, logged = [], [], [], []
    windows = fabric.accumulate(loader, STEPS, count=count)
    for micro_batches in windows:
        lengths.append(len(micro_batches))
        totals.append(micro_batches.total.item())
        loss = torch.tensor(0.0)
        for batch in micro_batches:
            with fabric.no_backward_sync(model, enabled=not micro_batches.is_last):
                part = micro_batches.mean(losses(model, batch))
                fabric.backward(part)
            loss += part.detach()
        logged.append(fabric.all_reduce(loss).item())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    assert len(windows) == len(lengths)
    return {
        "gradients": gradients,
        "parameters": [parameter.detach() for parameter in model.parameters()],
        "lengths": lengths,
        "totals": totals,
        "losses": logged,
    }


def by_hand(items, window, recipe):
    """`window` samples of the data set at a time, as one batch. What a micro-batch weighs is no question here."""
    model, optimizer = build()
    seen = {"gradients": [], "totals": [], "losses": []}
    for start in range(0, items, window):
        batch = padded([Texts(items)[index] for index in range(start, min(items, start + window))])
        losses = losses_of(model, batch)
        total = tokens(batch) if "tokens" in recipe else len(batch[0])
        loss = losses.sum() / total
        loss.backward()
        seen["totals"].append(total)
        seen["losses"].append(loss.item())
        seen["gradients"].append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, "parameters": [parameter.detach() for parameter in model.parameters()]}


def assert_same(result, expected):
    for ours, theirs in zip(result["gradients"], expected["gradients"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(result["parameters"], expected["parameters"], rtol=1e-12, atol=1e-14)
    assert result["totals"] == expected["totals"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)


# 7 micro-batches on each rank. The last ones: full; of fewer samples; of fewer samples and uneven over the ranks.
CASES = [(1, 14, 2), (1, 13, 2), (2, 28, 2), (2, 26, 2), (2, 25, 2), (2, 27, 2), (2, 13, 1)]


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", ["tokens of samples", "samples"])
@pytest.mark.parametrize(("ranks", "items", "batch_size"), CASES)
def test_windows_equal_big_batches(ranks, items, batch_size, recipe):
    expected = by_hand(items, ranks * batch_size * STEPS, recipe)
    for result in run_ranks(ranks, train, items, batch_size, recipe):
        assert result["lengths"] == [4, 3]
        assert_same(result, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", ["tokens", "micro-batches"])
@pytest.mark.parametrize(("ranks", "items"), [(1, 14), (2, 28)])
def test_recipes_for_samples_that_all_count(ranks, items, recipe):
    expected = by_hand(items, ranks * 2 * STEPS, recipe)
    for result in run_ranks(ranks, train, items, 2, recipe):
        if recipe == "micro-batches":
            assert result["totals"] == [4.0 * ranks, 3.0 * ranks]
            result["totals"] = expected["totals"]
        assert_same(result, expected)


def one_process(items=5, batch_size=2):
    fabric = Fabric(accelerator="cpu", devices=1)
    data = torch.arange(float(items))
    return fabric, fabric.setup_dataloaders(DataLoader(data, batch_size=batch_size))


def test_a_window_is_a_sequence_that_knows_its_last_batch():
    fabric, loader = one_process(items=5, batch_size=1)
    seen = []
    for micro_batches in fabric.accumulate(loader, 3):
        assert micro_batches.is_last
        for _ in range(2):  # as often as one likes
            seen.append([(batch.item(), micro_batches.is_last) for batch in micro_batches])
        assert [batch.item() for batch in micro_batches[:2]] == [batch for batch, _ in seen[-1][:2]]
        assert micro_batches[-1].item() == seen[-1][-1][0]
    first, second = [(0.0, False), (1.0, False), (2.0, True)], [(3.0, False), (4.0, True)]
    assert seen == [first, first, second, second]


def test_each_iteration_is_an_epoch_and_windows_that_come_out_even_end_there():
    fabric, loader = one_process(items=4, batch_size=1)
    windows = fabric.accumulate(loader, 2)
    assert [[len(window) for window in windows] for _ in range(2)] == [[2, 2], [2, 2]]
    assert len(windows) == 2
    assert loader.state_dict()["epoch"] == 2


def test_the_batches_of_one_window_at_a_time_are_kept():
    fabric, loader = one_process(items=4, batch_size=1)
    windows = iter(fabric.accumulate(loader, 2))
    first = next(windows)
    kept = [weakref.ref(batch) for batch in first]
    assert all(ref() is not None for ref in kept)
    next(windows)
    assert [ref() for ref in kept] == [None, None]
    assert len(first) == 2
    text = (
        "This window of `fabric.accumulate` is over: the batches of one window at a time are kept."
        " Use them before the next window is asked for."
    )
    for use in (lambda: first[0], lambda: list(first)):
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            use()


def test_where_nothing_counts_gradients_are_zero():
    fabric, loader = one_process()
    weight = torch.ones(1, requires_grad=True)
    for micro_batches in fabric.accumulate(loader, 3, count=lambda batch: 0):
        for batch in micro_batches:
            fabric.backward(micro_batches.mean((weight * batch * 0).sum()))
        assert micro_batches.total.item() == 0
    assert weight.grad.item() == 0


def test_a_sum_of_half_precision_losses_is_exact():
    fabric, loader = one_process(items=4096, batch_size=4096)
    for micro_batches in fabric.accumulate(loader, 1, count="samples"):
        for _ in micro_batches:
            mean = micro_batches.mean(torch.ones(4096, dtype=torch.float16) * 32)  # the sum is past the largest float16
    assert (mean.item(), mean.dtype) == (32.0, torch.float32)


MEAN = "`micro_batches.mean(loss)` takes the mean loss of the batch, and got a tensor of shape (2,)."
SAMPLES = "`micro_batches.mean(losses)` got losses of shape {} for a batch of 2 samples."


@pytest.mark.parametrize(
    ("count", "losses", "text"),
    [
        (
            None,
            torch.ones(2),
            f"{MEAN} Pass `losses.mean()`, or say what the mean is over:"
            " `fabric.accumulate(loader, steps, count='samples')`.",
        ),
        *(
            (
                count,
                losses,
                f"{SAMPLES.format(tuple(losses.shape))} Pass one for each sample (`reduction='none'`), so that those"
                " that only repeat others can be left out.",
            )
            for count in ("samples", torch.ones_like)
            for losses in (torch.tensor(1.0), torch.ones(6))
        ),
    ],
)
def test_losses_of_another_shape(count, losses, text):
    fabric, loader = one_process()
    for micro_batches in fabric.accumulate(loader, 3, count=count):
        for _ in micro_batches:
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                micro_batches.mean(losses)
            break


def test_a_mean_outside_of_the_loop():
    fabric, loader = one_process()
    text = (
        "`micro_batches.mean(losses)` belongs to the batch at hand, and there is none."
        " Call it inside `for batch in micro_batches:`."
    )
    for micro_batches in fabric.accumulate(loader, 3):
        for _ in micro_batches:
            break
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            micro_batches.mean(torch.tensor(1.0))
        assert micro_batches.is_last


@pytest.mark.parametrize(
    ("returned", "what"), [("many", "'many'"), (None, "None"), (torch.ones(2, 2), "a tensor of shape (2, 2)")]
)
def test_a_function_that_does_not_count(returned, what):
    fabric, loader = one_process()
    text = (
        "`fabric.accumulate(..., count=function)`: the function takes a batch and returns one number, or a tensor with"
        f" one for each sample, but this one returned {what}."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        list(fabric.accumulate(loader, 3, count=lambda batch: copy.copy(returned)))


def test_samples_of_a_batch_without_tensors():
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(DataLoader(["a", "b"], batch_size=2))
    text = (
        "`fabric.accumulate(..., count='samples')` takes the first dimension of the first tensor of a batch, and this"
        " one, of type `list`, has none. Pass a function that counts: `count=len`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        list(fabric.accumulate(loader, 3, count="samples"))
    for count in (len, lambda batch: np.int64(len(batch))):
        assert [window.total.item() for window in fabric.accumulate(loader, 3, count=count)] == [2.0]


def test_what_can_not_be_accumulated():
    fabric, loader = one_process()
    text = (
        "`fabric.accumulate(loader, steps)` takes a loader that `fabric.setup_dataloaders(...)` returned, but got"
        " `DataLoader`."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        fabric.accumulate(loader.loader, 2)
    for steps in (0, 1.5, True):
        text = f"`fabric.accumulate(loader, steps={steps})` takes the number of micro-batches of a window, 1 or more."
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            fabric.accumulate(loader, steps)
    text = (
        "`fabric.accumulate(loader, steps, count='tokens')` takes None, 'samples', or a function that is called with a"
        " batch and returns what counts in it."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        fabric.accumulate(loader, 2, count="tokens")
