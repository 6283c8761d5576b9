# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints: when one is due, which are kept, and what a signal that ends the job does."""

from fabric.checkpoint.keeping.manager import CheckpointManager
from fabric.checkpoint.keeping.rules import Kept

__all__ = ["CheckpointManager", "Kept"]
