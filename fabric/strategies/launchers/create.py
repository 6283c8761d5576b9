# SPDX-License-Identifier: Apache-2.0
"""From the plan's name of a launcher to the launcher."""

from fabric.plugins.environments import ClusterEnvironment
from fabric.strategies.launchers.external import ExternalLauncher
from fabric.strategies.launchers.launcher import Launcher
from fabric.strategies.launchers.multiprocessing import MultiprocessingLauncher
from fabric.strategies.launchers.subprocess import SubprocessLauncher


def create_launcher(name: str, *, environment: ClusterEnvironment, threads: int | None) -> Launcher:
    """The launcher of this name.

    Args:
        name: `none` (one process), `subprocess`, `spawn`, `fork`, `forkserver`, `external` (the ranks exist already).
        environment: The cluster, as this process sees it.
        threads: Threads of each rank; None leaves them alone.
    """
    if name in ("spawn", "fork", "forkserver"):
        return MultiprocessingLauncher(name, environment=environment, threads=threads)
    alone = environment.creates_processes_externally or environment.world_size() == 1
    if name == "subprocess" or (name == "none" and not alone):  # the only rank of this machine watches the others
        return SubprocessLauncher(environment=environment, threads=threads)
    return ExternalLauncher(environment=environment, threads=threads)
