# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fabric import Fabric
from fabric.loggers import Logger
from tests.ranks import RankContext, run_ranks


class ListLogger(Logger):
    name, version = "list", 0

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.rows.append({**metrics, "at": step})

    def log_hyperparams(self, params: Any) -> None:
        pass


def raised(fabric: Fabric, metrics: dict[str, Any], reduce: Any = "mean") -> str:
    try:
        fabric.log_dict(metrics, reduce=reduce)
    except ValueError as error:
        return str(error)
    return "nothing"


def log_on_ranks(context: RankContext) -> dict[str, Any]:
    rank = context.rank
    logger = ListLogger()
    fabric = context.fabric(loggers=logger if rank == 0 else None)  # a rank without loggers takes part
    metrics = {"loss": torch.tensor(0.25 * (rank + 1), dtype=torch.float64), "correct": rank + 2}
    for op in ("mean", "sum", "min", "max", None):
        fabric.log_dict(metrics, 7, reduce=op)
    fabric.log("nan", math.nan if rank == 1 else 1.0, reduce="max")
    fabric.log_dict({"inf": math.inf if rank else -math.inf, "small": np.float32(0.5), "yes": rank == 0}, reduce="sum")
    errors = [
        raised(fabric, {"both": 1.0, **({"val": 1.0} if rank == 2 else {}), **({"test": 1.0} if rank else {})}),
        raised(fabric, {"loss": "low" if rank == 1 else torch.ones(2) if rank == 2 else 1.0}),
        raised(fabric, {}, reduce="men"),
        raised(fabric, {}),
    ]
    return {"rows": logger.rows, "errors": errors}


@pytest.mark.ranks
def test_metrics_are_reduced_on_request_only() -> None:
    zero, one, two = run_ranks(3, log_on_ranks)
    mean, total, least, most, own, nan, rest, *_ = zero["rows"]
    assert mean == {"loss": 0.5, "correct": 3.0, "at": 7}
    assert total == {"loss": 1.5, "correct": 9, "at": 7}
    assert least == {"loss": 0.25, "correct": 2, "at": 7}
    assert most == {"loss": 0.75, "correct": 4, "at": 7}
    assert own == {"loss": 0.25, "correct": 2, "at": 7}
    assert math.isnan(nan["nan"])
    assert math.isnan(rest["inf"])
    assert (rest["small"], rest["yes"]) == (1.5, 1)
    assert one["rows"] == two["rows"] == []
    assert zero["errors"] == one["errors"] == two["errors"]
    assert zero["errors"] == [
        "`log_dict(..., reduce=...)` needs the same names on all 3 ranks, but some lack `test` (on ranks 1, 2),"
        " `val` (on rank 2 only). Log those without `reduce`, or on every rank.",
        "`log_dict(..., reduce='mean')` takes numbers. Got rank 1: a `str` for `loss`;"
        " rank 2: a tensor of shape (2,) for `loss`.",
        "`log_dict(..., reduce='men')` is not a known reduction. Did you mean 'mean'?"
        " Choose one of 'mean', 'sum', 'min', 'max'.",
        "nothing",
    ]


def test_one_process_reduces_too() -> None:
    logger = ListLogger()
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    fabric.log("loss", torch.tensor([0.5]), step=1, reduce="mean")
    fabric.log_dict({"correct": 3}, reduce="max")
    assert logger.rows == [{"loss": 0.5, "at": 1}, {"correct": 3, "at": None}]


def test_ranks_that_are_not_launched_say_so() -> None:
    with pytest.raises(RuntimeError, match=r"launch\(\)"):
        Fabric(accelerator="cpu", devices=2).log("loss", 1.0, reduce="mean")
