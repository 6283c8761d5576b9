# SPDX-License-Identifier: Apache-2.0
"""What a user plugs into Fabric: precisions, cluster environments, checkpoint files."""

from fabric.plugins.environments import ClusterEnvironment
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

__all__ = [
    "CheckpointIO",
    "ClusterEnvironment",
    "DoublePrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TorchCheckpointIO",
]
