# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one machine as processes that run the program again."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from fabric.processes.child import Child
from fabric.processes.command import Command
from fabric.processes.forks import in_forked_children
from fabric.processes.mailbox import Mailbox
from fabric.processes.record import Records
from fabric.processes.token import LaunchToken


class Job(NamedTuple):
    """What the ranks of one machine have in common; see `LaunchToken`."""

    launcher: str
    cluster: str
    node_rank: int
    first_rank: int
    world_size: int
    local_world_size: int
    store_host: str
    store_port: int


class Pipes:
    """The pipes between a launcher and its ranks. `close_given` lets go of the ranks' ends, once they have them.

    Args:
        job: The job; with `store_port` 0 its ranks also get a pipe that carries the port.
        mailbox: Where the ranks tell what happens to them.
        records: Where failing ranks leave their records.
    """

    def __init__(self, job: Job, *, mailbox: Mailbox, records: Records) -> None:
        self._job = job
        self._mailbox = mailbox
        self._records = records
        self._port = () if job.store_port else os.pipe()
        self._deaths: dict[int, tuple[int, int]] = {}
        in_forked_children(self.close_kept)

    def token(self, local_rank: int) -> LaunchToken:
        """The token of one rank. Its descriptors are to be passed to the rank's process under the same numbers."""
        job = self._job
        self._deaths[local_rank] = os.pipe()
        return LaunchToken(
            launcher_pid=os.getpid(),
            launcher=job.launcher,
            cluster=job.cluster,
            rank=job.first_rank + local_rank,
            local_rank=local_rank,
            node_rank=job.node_rank,
            world_size=job.world_size,
            local_world_size=job.local_world_size,
            store_host=job.store_host,
            store_port=job.store_port,
            port_fd=(self._port[1] if local_rank == 0 else self._port[0]) if self._port else None,
            death_fd=self._deaths[local_rank][0],
            records=self._records.directory,
            control_fd=self._mailbox.writer,
        )

    def foreign(self, token: LaunchToken) -> tuple[int, ...]:
        """The ranks' ends that are open here and are none of this rank's: a fork inherits them."""
        given = (*self._port, *(reader for reader, _ in self._deaths.values()))
        return tuple(fd for fd in given if fd not in descriptors(token))

    def close_given(self) -> None:
        """Close the ends that only the ranks need."""
        for descriptor in (*self._port, *(reader for reader, _ in self._deaths.values())):
            os.close(descriptor)
        self._port = ()

    def close_kept(self) -> None:
        """Close the write ends of the death pipes, in a forked child or when no rank is left."""
        for _, writer in self._deaths.values():
            os.close(writer)
        self._deaths.clear()


def descriptors(token: LaunchToken) -> tuple[int, ...]:
    """The descriptors that the rank's process needs."""
    return tuple(fd for fd in (token.port_fd, token.death_fd, token.control_fd) if fd is not None)


def start_rank(
    command: Command, token: LaunchToken, *, environ: Mapping[str, str], threads: int | None, at_terminal: bool
) -> Child:
    """Start one rank.

    Args:
        command: The program.
        token: The rank's place in the job.
        environ: The environment variables that the ranks start from.
        threads: `OMP_NUM_THREADS` for the rank; None leaves it alone.
        at_terminal: Whether the rank keeps this process's terminal: its standard input and its process group. The
            others read from the null device and lead sessions of their own.
    """
    variables = {**environ, **token.to_environ()}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    if not at_terminal:
        variables.setdefault("PYTHONBREAKPOINT", "0")
        variables.pop("PYTHONINSPECT", None)
    process = subprocess.Popen(
        command.words,
        cwd=command.directory,
        env=variables,
        stdin=None if at_terminal else subprocess.DEVNULL,
        start_new_session=not at_terminal,
        pass_fds=descriptors(token),
    )
    _arm(token.death_fd, process.pid if at_terminal else -process.pid)
    return Child(token.rank, process.pid, join=process.wait, leads_session=not at_terminal)


def _arm(death_fd: int | None, target: int) -> None:
    """Let the kernel end a rank whose launcher is gone, until the rank watches the pipe itself.

    Args:
        death_fd: The read end that the rank has inherited.
        target: The rank's pid, or its process group, negative.
    """
    if sys.platform != "linux" or death_fd is None:
        return
    import fcntl

    fcntl.fcntl(death_fd, fcntl.F_SETOWN, target)
    fcntl.fcntl(death_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(death_fd, fcntl.F_SETFL, fcntl.fcntl(death_fd, fcntl.F_GETFL) | os.O_ASYNC)
