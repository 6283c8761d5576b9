# SPDX-License-Identifier: Apache-2.0
import json
import pickle
import re

import pytest
import torch
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.utilities.spike import Spike, SpikeDetection, TrainingSpikeError
from tests.ranks import run_ranks


def _spikes(losses, **options):
    """The batches that spike, of those losses."""
    fabric = Fabric(accelerator="cpu")
    detection = SpikeDetection(on_spike=lambda spike: None, **options)
    for index, loss in enumerate(losses):
        detection.on_train_batch_end(fabric, loss, None, index)
    return detection.bad_batches


@pytest.mark.parametrize(
    ("losses", "options", "spikes"),
    [
        ([1.0, 1.0, 2.9, 1.0], {}, []),  # 1.9 off a mean of 1
        ([1.0, 1.0, 3.1, 1.0, 3.1], {}, [2, 4]),  # and the spike does not count for the mean
        ([4.0, 1.0, 0.1], {}, []),  # a fall is no spike
        ([1.0, 9.0, 9.0, 30.0], {"warmup": 3, "rtol": 1.0}, [3]),
        ([1.0, 9.0], {"warmup": 0, "rtol": 1.0}, [1]),
        ([0.9, 0.9, 0.2], {"mode": "max", "rtol": 0.5}, [2]),
        ([0.9, 0.9, 5.0], {"mode": "max", "rtol": 0.5}, []),
        ([1.0, 1.4, 1.6], {"atol": 0.5, "rtol": None, "window": 1}, []),
        ([1.0, 1.4, 2.0], {"atol": 0.5, "rtol": None, "window": 1}, [2]),
        ([0.01, 0.1], {"atol": 0.5}, []),  # both conditions must hold
        ([-2.0, -2.0, -1.0, 3.0], {"rtol": 1.0}, [3]),  # a mean below zero
        ([float("nan"), 1.0, float("inf"), 1.0], {"warmup": 5}, [0, 2]),
        ([1.0, float("nan"), 1.0, 3.1], {"finite_only": False}, [3]),
        ([torch.tensor(1.0, requires_grad=True), torch.tensor([[8.0]])], {}, [1]),
    ],
)
def test_what_is_a_spike(losses, options, spikes) -> None:
    assert _spikes(losses, **options) == spikes


def test_a_spike_raises_and_says_where() -> None:
    fabric = Fabric(accelerator="cpu", callbacks=SpikeDetection())
    for index in range(3):
        fabric.call("on_train_batch_end", fabric=fabric, loss=torch.tensor(0.5), batch=None, batch_idx=index)
    message = (
        "The loss has spiked in batch 3 (rank 0: 8, mean 0.5). Go on from a checkpoint before it and leave the batch"
        " out: `SpikeDetection.skips(batch_idx)` says when."
    )
    with pytest.raises(TrainingSpikeError, match=f"^{re.escape(message)}$") as raised:
        fabric.call("on_train_batch_end", fabric=fabric, loss=torch.tensor(8.0), batch=None, batch_idx=3)
    assert (raised.value.batch_idx, raised.value.spike) == (3, Spike(3))
    assert pickle.loads(pickle.dumps(raised.value)).spike == Spike(3)


@pytest.mark.parametrize("url", [False, True])
def test_the_next_run_leaves_the_batch_out(tmp_path, url) -> None:
    fabric = Fabric(accelerator="cpu")
    path = f"{'file://' if url else ''}{tmp_path}/folder/spikes.json"

    def run(detection):
        """The values that were trained on."""
        loader = fabric.setup_dataloaders(DataLoader(torch.arange(8.0), batch_size=2))
        seen = []
        for epoch in range(2):
            for index, batch in enumerate(loader):
                if detection.skips(index, loader):
                    continue
                loss = 100.0 if epoch == 1 and batch[0] == 4 else 1.0
                detection.on_train_batch_end(fabric, loss, batch, index, loader=loader)
                seen.append(int(batch[0]))
        return seen

    with pytest.raises(TrainingSpikeError):
        run(SpikeDetection(exclude_batches_path=path))
    assert json.loads((tmp_path / "folder" / "spikes.json").read_text()) == [
        {"batch_idx": 2, "epoch": 1, "position": 2}
    ]
    again = SpikeDetection(exclude_batches_path=path)
    again.load_spikes(fabric)
    again.load_spikes(fabric)
    assert again.spikes == [Spike(2, epoch=1, position=2)]
    assert run(again) == [0, 2, 4, 6, 0, 2, 6]
    assert again.skips(2)
    assert not again.skips(3)
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["spikes.json"]


def test_a_file_that_can_not_be_read_or_written(tmp_path) -> None:
    fabric = Fabric(accelerator="cpu")
    path = tmp_path / "spikes.json"
    path.write_text("no json")
    detection = SpikeDetection(exclude_batches_path=path)
    with pytest.raises(RuntimeError, match=rf"^`SpikeDetection.load_spikes\(...\)` can't read `{path}`: JSONDecodeErr"):
        detection.load_spikes(fabric)
    with pytest.raises(RuntimeError, match=r"^The spike in batch 0 could not be noted in the file: JSONDecodeError: "):
        detection.on_train_batch_end(fabric, float("nan"))
    assert path.read_text() == "no json"
    SpikeDetection().load_spikes(fabric)  # no file, nothing to read


def test_state_goes_on() -> None:
    fabric = Fabric(accelerator="cpu")
    first = SpikeDetection(warmup=2, window=3, on_spike=lambda spike: None)
    for index, loss in enumerate([1.0, 2.0, 3.0, 50.0, 4.0]):
        first.on_train_batch_end(fabric, loss, None, index)
    second = SpikeDetection(warmup=2, window=3, on_spike=lambda spike: None)
    second.spikes.append(Spike(9))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == {**first.state_dict(), "spikes": [*first.state_dict()["spikes"], vars(Spike(9))]}
    second.on_train_batch_end(fabric, 9.1, None, 5)  # the mean is 3
    assert second.bad_batches == [3, 9, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "up"}, "`SpikeDetection(mode='up')` is not known. Choose `min` or `max`."),
        ({"window": 0}, "`SpikeDetection(window=0)` holds no loss. Write 1 or more."),
        (
            {"rtol": None},
            "`SpikeDetection(atol=None, rtol=None)` has nothing to tell a spike by. Give one of them, or both.",
        ),
        ({"atol": -1.0}, "`SpikeDetection(atol=-1.0)` is negative. Write 0 or more, or None."),
    ],
)
def test_wrong_arguments(options, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SpikeDetection(**options)


def test_a_loss_of_several_numbers() -> None:
    message = (
        "`SpikeDetection` needs one number, but got a loss of shape (2,). Reduce it first, for example with `.mean()`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SpikeDetection().on_train_batch_end(Fabric(accelerator="cpu"), torch.ones(2))


def _spike_on_one(context):
    fabric = context.fabric()
    detection = SpikeDetection(exclude_batches_path=context.directory / "spikes.json")
    for index in range(2):
        detection.on_train_batch_end(fabric, 1.0 + context.rank, None, index)
    try:
        detection.on_train_batch_end(fabric, 1.0 if context.rank == 0 else float("nan"), None, 2)
    except TrainingSpikeError as error:
        text = str(error)
    again = SpikeDetection(exclude_batches_path=context.directory / "spikes.json")
    again.load_spikes(fabric)
    (context.directory / "spikes.json").unlink(missing_ok=True)
    return text, again.bad_batches


@pytest.mark.ranks
def test_a_spike_on_one_rank_is_one_on_all() -> None:
    first, second = run_ranks(2, _spike_on_one)
    assert first == second
    assert first == (
        "The loss has spiked in batch 2 (rank 1: nan, mean 2). Go on from a checkpoint before it and leave the batch"
        " out: `SpikeDetection.skips(batch_idx)` says when.",
        [2],
    )
