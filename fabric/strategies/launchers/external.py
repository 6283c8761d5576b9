# SPDX-License-Identifier: Apache-2.0
"""Every rank is a process already: `torchrun`, `fabric run`, a rank that rank 0 started, a job of one process."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from typing_extensions import override

from fabric.plugins.environments import ClusterEnvironment, LaunchedEnvironment
from fabric.processes.rank import Rank
from fabric.processes.token import LaunchToken
from fabric.strategies.launchers.group import keep_group_at_exit, leave_group, leave_group_at_exit
from fabric.strategies.launchers.launcher import Launcher
from fabric.strategies.launchers.machines import announce_lost_machine

T = TypeVar("T")


class ExternalLauncher(Launcher):
    """Starts nothing. In a rank that Fabric started, it makes sure that the rank does not outlive its launcher.

    Args:
        environment: The cluster, as this process sees it.
        threads: Threads of this rank; None leaves them alone.
    """

    def __init__(self, *, environment: ClusterEnvironment, threads: int | None = None) -> None:
        self._environment = environment
        self._threads = threads

    @override
    def launch(self, enter: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if isinstance(self._environment, LaunchedEnvironment):
            StartedRank.begin(self._environment.token)
        elif self._environment.world_size() > 1:
            leave_group_at_exit()
        return enter(self._environment, *args, **kwargs)

    @override
    def teardown(self) -> None:
        keep_group_at_exit()
        if isinstance(self._environment, LaunchedEnvironment):
            StartedRank.rest()


class StartedRank:
    """This process, as a rank that Fabric started: it becomes one once."""

    _rank: ClassVar[Rank | None] = None

    @classmethod
    def begin(cls, token: LaunchToken) -> Rank:
        """Become the rank, at the first call."""
        if cls._rank is None:
            cls._rank = Rank(token, leave=leave_group, on_gone=lambda: announce_lost_machine(token))
            cls._rank.install()
        return cls._rank

    @classmethod
    def rest(cls) -> None:
        """Take the hooks away; the watch for the launcher's end goes on."""
        if cls._rank is not None:
            cls._rank.uninstall()
