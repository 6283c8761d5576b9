# SPDX-License-Identifier: Apache-2.0
"""Where the numbers go that a program logs. A client's own package is imported when its logger first writes."""

from typing import TYPE_CHECKING

from fabric.loggers.logger import Logger
from fabric.utilities.lazy import importing_on_use

if TYPE_CHECKING:
    from fabric.loggers.aim import AimLogger
    from fabric.loggers.clearml import ClearMLLogger
    from fabric.loggers.comet import CometLogger
    from fabric.loggers.csv_logs import CSVLogger
    from fabric.loggers.mlflow import MLFlowLogger
    from fabric.loggers.swanlab import SwanLabLogger
    from fabric.loggers.tensorboard import TensorBoardLogger
    from fabric.loggers.trackio import TrackioLogger
    from fabric.loggers.wandb import WandbLogger

__all__ = [
    "AimLogger",
    "CSVLogger",
    "ClearMLLogger",
    "CometLogger",
    "Logger",
    "MLFlowLogger",
    "SwanLabLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
]

# Resolved on first use, so that a program imports the loggers that it has.
_EXPORTS = {
    "AimLogger": "fabric.loggers.aim",
    "CSVLogger": "fabric.loggers.csv_logs",
    "ClearMLLogger": "fabric.loggers.clearml",
    "CometLogger": "fabric.loggers.comet",
    "MLFlowLogger": "fabric.loggers.mlflow",
    "SwanLabLogger": "fabric.loggers.swanlab",
    "TensorBoardLogger": "fabric.loggers.tensorboard",
    "TrackioLogger": "fabric.loggers.trackio",
    "WandbLogger": "fabric.loggers.wandb",
}


__getattr__ = importing_on_use(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
