# SPDX-License-Identifier: Apache-2.0
"""Where the numbers go that a program logs. A client's own package is imported when its logger first writes."""

from fabric.loggers.aim import AimLogger
from fabric.loggers.clearml import ClearMLLogger
from fabric.loggers.comet import CometLogger
from fabric.loggers.csv_logs import CSVLogger
from fabric.loggers.logger import Logger
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
