# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the files of checkpoints."""

from fabric.plugins.io.checkpoint_io import CheckpointIO
from fabric.plugins.io.torch_io import TorchCheckpointIO

__all__ = ["CheckpointIO", "TorchCheckpointIO"]
