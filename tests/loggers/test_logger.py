# SPDX-License-Identifier: Apache-2.0
from collections.abc import Mapping
from typing import Any

import pytest
from torch.nn import Linear

from fabric.loggers.logger import Logger


class RecordingLogger(Logger):
    name, version = "recording", 0

    def __init__(self) -> None:
        self.metrics: list[tuple[dict[str, Any], int | None]] = []
        self.params: list[Any] = []
        self.saved = 0

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.metrics.append((dict(metrics), step))

    def log_hyperparams(self, params: Any) -> None:
        self.params.append(params)

    def save(self) -> None:
        self.saved += 1


def test_a_logger_of_ones_own_implements_four_names() -> None:
    assert Logger.__abstractmethods__ == {"name", "version", "log_metrics", "log_hyperparams"}
    with pytest.raises(TypeError, match="abstract"):
        Logger()  # type: ignore[abstract]


def test_the_other_methods_have_a_default() -> None:
    logger = RecordingLogger()
    assert logger.root_dir is None
    assert logger.log_dir is None
    logger.log_graph(Linear(1, 1))
    logger.finalize("success")
    assert logger.saved == 1
