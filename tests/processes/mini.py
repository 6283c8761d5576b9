# SPDX-License-Identifier: Apache-2.0
"""A launcher without torch, for scripts of tests whose outcome does not depend on collectives."""

import os

from fabric.processes.command import rebuild_command
from fabric.processes.inside import InsideSupervisor
from fabric.processes.mailbox import Mailbox
from fabric.processes.rank import Rank
from fabric.processes.record import Records
from fabric.processes.start import Job, Pipes, start_rank
from fabric.processes.supervisor import read_grace
from fabric.processes.token import LaunchToken

LAUNCHED: list[Rank | InsideSupervisor] = []


def launch(world_size: int = 2) -> int:
    """Start and join the ranks as `fabric.launch()` does; returns the rank of this process."""
    token = LaunchToken.from_environ(os.environ, parent_pid=os.getppid())
    if token is not None:
        LAUNCHED.append(Rank(token, leave=_nothing))
        LAUNCHED[0].install()
        return token.rank
    mailbox, records = Mailbox(), Records.create()
    job = Job("rank 0", "local", 0, 0, world_size, world_size, "127.0.0.1", 1)
    pipes = Pipes(job, mailbox=mailbox, records=records)
    command = rebuild_command()
    children = [
        start_rank(command, pipes.token(rank), environ=os.environ, threads=1, at_terminal=False)
        for rank in range(1, world_size)
    ]
    pipes.close_given()
    grace = read_grace(os.environ)
    LAUNCHED.append(InsideSupervisor(0, children, mailbox=mailbox, records=records, grace=grace, leave=_nothing))
    LAUNCHED[0].install()
    global _pipes
    _pipes = pipes  # its write ends live as long as this process
    return 0


_pipes: Pipes | None = None


def _nothing() -> None: ...
