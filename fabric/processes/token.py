# SPDX-License-Identifier: Apache-2.0
"""What a rank that Fabric started knows about itself."""

import json
from collections.abc import Mapping
from typing import NamedTuple

VARIABLE = "FABRIC_LAUNCH"


class LaunchToken(NamedTuple):
    """The place of one rank in the job, handed from the process that starts it.

    Args:
        launcher_pid: The process that started this rank; in any other process the token counts for nothing.
        launcher: Who started it, for messages: `rank 0` or `fabric run`.
        cluster: Name of the cluster environment that the launcher ran in.
        rank: Global rank.
        local_rank: Rank on this machine.
        node_rank: Index of this machine.
        world_size: Number of processes of the whole job.
        local_world_size: Number of processes on this machine.
        store_host: Where the rendezvous store listens.
        store_port: Its port; 0 when rank 0 of this machine hosts it and hands the port on through `port_fd`.
        port_fd: With `store_port` 0: the pipe that carries the port (rank 0 writes, the others read).
        death_fd: Read end of the pipe whose write end only the launcher holds; end of file means the launcher is gone.
        records: Directory in which a failing rank leaves its record.
        control_fd: Write end of the pipe through which the rank tells the launcher what happens to it.
    """

    launcher_pid: int
    launcher: str
    cluster: str
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    store_host: str
    store_port: int
    port_fd: int | None
    death_fd: int | None
    records: str
    control_fd: int | None = None

    def to_environ(self) -> dict[str, str]:
        """The one variable that carries the token to a child."""
        return {VARIABLE: json.dumps(self._asdict())}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], *, parent_pid: int) -> "LaunchToken | None":
        """The token of this process; None where its parent is not the launcher: a user's own subprocess is no rank."""
        text = environ.get(VARIABLE)
        if not text:
            return None
        token = cls(**json.loads(text))
        return token if token.launcher_pid == parent_pid else None
