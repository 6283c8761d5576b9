# SPDX-License-Identifier: Apache-2.0
"""Where the numbers go that a program logs."""

from fabric.loggers.csv_logs import CSVLogger
from fabric.loggers.logger import Logger

__all__ = ["CSVLogger", "Logger"]
