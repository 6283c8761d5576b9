# SPDX-License-Identifier: Apache-2.0
"""Time from `load_state_dict` to the first batch, against the position in the epoch."""

import functools
import statistics

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.report import NAMES, Row, in_turn, interval, main, median_ratio, seconds
from fabric import Fabric

BATCHES, BATCH_SIZE = 100_000, 8
POSITIONS = (1, 1_000, 99_000)


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def measure(quick: bool) -> list[Row]:
    fabric = Fabric(accelerator="cpu", devices=1)
    rows = []
    for shuffle in (False, True):
        loader = fabric.setup_dataloaders(DataLoader(Numbers(), batch_size=BATCH_SIZE, shuffle=shuffle))
        actions = {str(position): functools.partial(_first_batch, loader, position) for position in POSITIONS}
        times = in_turn(actions, 3 if quick else 40)
        base = times[str(POSITIONS[0])]
        what = f"first batch after resuming, {'shuffled' if shuffle else 'in order'}"
        for position in POSITIONS[1:]:
            values = times[str(position)]
            ratio, (low, high) = median_ratio(values, base), interval(median_ratio, values, base)
            seen = (
                f"{ratio:.2f} x ({low:.2f} to {high:.2f}) at batch {position:,} of {BATCHES:,};"
                f" {statistics.median(base) * 1e3:.2f} ms at batch {POSITIONS[0]}"
            )
            rows.append(Row(what, NAMES["fabric"], seen, "flat: 1.1 x", low <= 1.1))
    return rows


def _first_batch(loader: DataLoader[torch.Tensor], position: int) -> float:
    state = {"epoch": 0, "position": position, "consumed": position * BATCH_SIZE, "seed": 0}

    def resume() -> None:
        loader.load_state_dict(state)  # type: ignore[attr-defined]
        next(iter(loader))

    return seconds(resume)


if __name__ == "__main__":
    main(measure)
