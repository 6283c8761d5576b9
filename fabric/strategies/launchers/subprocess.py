# SPDX-License-Identifier: Apache-2.0
"""This process is the first rank of its machine, and starts the others by running the program again."""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
from typing_extensions import override

from fabric.plugins.environments import ClusterEnvironment, LocalEnvironment
from fabric.processes.child import Child
from fabric.processes.command import rebuild_command
from fabric.processes.inside import InsideSupervisor
from fabric.processes.mailbox import Mailbox
from fabric.processes.record import Records
from fabric.processes.start import Pipes, start_rank
from fabric.processes.supervisor import read_grace
from fabric.strategies.launchers.group import leave_group
from fabric.strategies.launchers.job import job_in
from fabric.strategies.launchers.launcher import Launcher
from fabric.strategies.launchers.machines import Machines

T = TypeVar("T")


class SubprocessLauncher(Launcher):
    """Runs the program again for each other rank of this machine, and supervises them from this process.

    A process launches once: a second launcher joins what the first one has started.

    Args:
        environment: The cluster, as this process sees it.
        threads: Threads of each rank; None leaves them alone.
    """

    _active: ClassVar["SubprocessLauncher | None"] = None

    def __init__(self, *, environment: ClusterEnvironment, threads: int | None = None) -> None:
        self._environment = environment
        self._threads = threads
        self._supervisor: InsideSupervisor | None = None

    @override
    def launch(self, enter: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        active = SubprocessLauncher._active
        if active is None:
            self._start()
            active = SubprocessLauncher._active = self
        active._validate_can_be_joined(self._environment)
        return enter(active._environment, *args, **kwargs)

    @classmethod
    def job_failed(cls) -> bool:
        """Whether a rank of the job that this process has started has failed, or a signal ends it, as far as known."""
        supervisor = None if cls._active is None else cls._active._supervisor
        return supervisor is not None and supervisor.failed

    @override
    def teardown(self) -> None:
        if self._supervisor is not None:
            self._supervisor.uninstall()

    @classmethod
    def launched_environment(cls) -> ClusterEnvironment | None:
        """The job that this process has started, as it sees it; None where it has started none."""
        return None if cls._active is None else cls._active._environment

    def _validate_can_be_joined(self, other: ClusterEnvironment) -> None:
        if self._supervisor is not None and self._supervisor.ended:
            raise RuntimeError(
                "`fabric.launch()`: this process has launched before, and ranks that it started have ended since."
                " A process launches once: start a process of its own for each job."
            )
        if other.world_size() != self._environment.world_size():
            raise RuntimeError(
                f"`Fabric` asks for {other.world_size()} processes, but this process has already started a job of"
                f" {self._environment.world_size()}. A process launches once: give both `Fabric` objects the same"
                " `devices=` and `num_nodes=`."
            )

    def _start(self) -> None:
        grace = read_grace(os.environ)
        if sys.platform == "win32":
            raise RuntimeError("`fabric.launch()` starts one process on Windows. Write `devices=1`, or use WSL.")
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        mailbox, records = Mailbox(), Records.create()
        children = self._start_children(mailbox, records)
        environment = self._environment
        machines = Machines.of(environment, mailbox) if environment.num_nodes() > 1 else None
        self._supervisor = InsideSupervisor(
            environment.global_rank(),
            children,
            mailbox=mailbox,
            records=records,
            grace=grace,
            leave=leave_group,
            machines=machines,
        )
        self._supervisor.install()

    def _start_children(self, mailbox: Mailbox, records: Records) -> list[Child]:
        environment = self._environment
        local = environment.local_world_size()
        if local == 1:
            return []
        command = rebuild_command()
        if isinstance(environment, LocalEnvironment):
            environment.create_store(timedelta(minutes=30))  # the system chooses its port; the strategy gets the same
        job = job_in(environment, launcher=f"rank {environment.global_rank()}", store_port=environment.main_port)
        self._pipes = Pipes(job, mailbox=mailbox, records=records)
        children: list[Child] = []
        try:
            for rank in range(1, local):
                token = self._pipes.token(rank)
                child = start_rank(command, token, environ=os.environ, threads=self._threads, at_terminal=False)
                children.append(child)
        except BaseException:
            for child in children:
                child.send(signal.SIGKILL, group=True)
            records.remove()
            raise
        self._pipes.close_given()
        return children
