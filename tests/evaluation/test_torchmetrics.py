# SPDX-License-Identifier: Apache-2.0
"""Metrics of `torchmetrics` on ranks whose last batches are uneven, against one process that sees all the data."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.ranks import run_ranks

pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
pytestmark = pytest.mark.ranks

CLASSES, LENGTH, IGNORED = 3, 6, -100


class Scores(Dataset):
    """Logits and a label for each sample, and for each of its tokens."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        logits = torch.randn(CLASSES, generator=generator)
        token_logits = torch.randn(LENGTH, CLASSES, generator=generator)
        tokens = torch.randint(CLASSES, (LENGTH,), generator=generator)
        tokens[index % LENGTH + 1 :] = IGNORED
        return logits, torch.randint(CLASSES, (), generator=generator), token_logits, tokens


def metrics(**options):
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
    from torchmetrics.text import Perplexity

    accuracy = MulticlassAccuracy(CLASSES, average="macro", **options)
    return accuracy, MulticlassAUROC(CLASSES, **options), Perplexity(ignore_index=IGNORED, **options)


def update(accuracy, auroc, perplexity, logits, labels, token_logits, tokens):
    accuracy.update(logits, labels)
    auroc.update(logits.softmax(1), labels)
    perplexity.update(token_logits, tokens)


def computed(*found):
    return [metric.compute().item() for metric in found]


def gathered(context, items, batch_size):
    fabric = context.fabric(strategy="ddp")
    loader = fabric.setup_dataloaders(DataLoader(Scores(items), batch_size=batch_size))
    found = metrics(sync_on_compute=False)  # every rank has seen everything
    for batch in loader:
        update(*found, *fabric.gather_for_metrics(batch, loader))
    return computed(*found)


def synchronised(context, items, batch_size):
    fabric = context.fabric(strategy="ddp")
    loader = fabric.setup_dataloaders(DataLoader(Scores(items), batch_size=batch_size))
    found = metrics()
    for batch in loader:
        if loader.share.valid != 0:
            update(*found, *(tensor[: loader.share.valid] for tensor in batch))
    return computed(*found)


@pytest.mark.parametrize("way", [gathered, synchronised])
@pytest.mark.parametrize(("items", "batch_size"), [(23, 4), (24, 5), (9, 1), (7, 20)])
def test_two_ranks_equal_one_process(way, items, batch_size):
    found = metrics()
    update(*found, *(torch.stack(column) for column in zip(*(Scores(items)[i] for i in range(items)), strict=True)))
    for result in run_ranks(2, way, items, batch_size):
        assert result[0] == found[0].compute().item()
        assert result == pytest.approx(computed(*found), rel=1e-6)
