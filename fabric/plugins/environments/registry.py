# SPDX-License-Identifier: Apache-2.0
"""The cluster environments in the order in which they are looked for."""

from collections.abc import Mapping

from fabric.plugins.environments.environment import ClusterEnvironment
from fabric.plugins.environments.local import LocalEnvironment
from fabric.plugins.environments.plain import PlainEnvironment
from fabric.plugins.environments.torchelastic import TorchElasticEnvironment

# In front: a rank that `torchrun` started also has the variables of the plain cluster.
_DETECTABLE: tuple[type[TorchElasticEnvironment] | type[PlainEnvironment], ...] = (
    TorchElasticEnvironment,
    PlainEnvironment,
)


def detect_environment(environ: Mapping[str, str]) -> ClusterEnvironment:
    """The cluster that the variables in `environ` describe: torchrun, then plain, else this machine alone."""
    for kind in _DETECTABLE:
        if kind.detect(environ):
            return kind(environ)
    return LocalEnvironment()
