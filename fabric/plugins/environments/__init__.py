# SPDX-License-Identifier: Apache-2.0
"""Clusters: who this process is in the job, and where the ranks meet."""

from fabric.plugins.environments.environment import ClusterEnvironment, Fact, Sizes
from fabric.plugins.environments.launched import LaunchedEnvironment
from fabric.plugins.environments.local import LocalEnvironment
from fabric.plugins.environments.plain import PlainEnvironment
from fabric.plugins.environments.registry import detect_environment
from fabric.plugins.environments.torchelastic import TorchElasticEnvironment

# Lightning Fabric's name for it.
LightningEnvironment = LocalEnvironment

__all__ = [
    "ClusterEnvironment",
    "Fact",
    "LaunchedEnvironment",
    "LightningEnvironment",
    "LocalEnvironment",
    "PlainEnvironment",
    "Sizes",
    "TorchElasticEnvironment",
    "detect_environment",
]
