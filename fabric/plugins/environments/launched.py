# SPDX-License-Identifier: Apache-2.0
"""A rank that Fabric itself started, in whichever cluster."""

import os
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__
from typing_extensions import override

from fabric.plugins.environments.environment import ClusterEnvironment, Fact, Sizes
from fabric.processes.token import LaunchToken

_PORT_BYTES = 8


class LaunchedEnvironment(ClusterEnvironment):
    """What the launcher told this rank.

    Args:
        token: The rank's place in the job and the way to its store.
    """

    name = "launched"

    def __init__(self, token: LaunchToken) -> None:
        self.token = token
        self._store: TCPStore | None = None

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self.token.store_host

    @property
    @override
    def main_port(self) -> int:
        """The store's port. Where rank 0 of this machine opens it on a free one, it is known once the store is open."""
        if self.token.store_port:
            return self.token.store_port
        if self._store is None:
            raise RuntimeError(
                "`LaunchedEnvironment.main_port` is known once the store is open. Call `create_store(timeout)` first."
            )
        return self._store.port

    @property
    @override
    def started_by(self) -> str:
        return f"{self.token.launcher} (pid {self.token.launcher_pid})"

    @override
    def world_size(self) -> int:
        return self.token.world_size

    @override
    def global_rank(self) -> int:
        return self.token.rank

    @override
    def local_rank(self) -> int:
        return self.token.local_rank

    @override
    def node_rank(self) -> int:
        return self.token.node_rank

    @override
    def local_world_size(self) -> int:
        return self.token.local_world_size

    @override
    def sizes(self) -> Sizes:
        source = f"started by {self.started_by}"
        return Sizes(
            world_size=Fact(self.world_size(), source),
            local_world_size=Fact(self.local_world_size(), source),
            num_nodes=Fact(self.num_nodes(), source),
        )

    @override
    def create_store(self, timeout: timedelta) -> Store:
        """Meet at the given port, or at the one that rank 0 gets from the system and hands on through the pipe.

        Rank 0 is the store's host in both cases; where the launcher is rank 0, no started rank is.
        """
        if self._store is None:
            is_host = self.token.rank == 0
            port = self.token.store_port or (0 if is_host else self._receive_port())
            self._store = TCPStore(
                self.token.store_host, port, is_master=is_host, wait_for_workers=False, timeout=timeout
            )
            if is_host and not self.token.store_port:
                self._send_port(self._store.port)
        return self._store

    def _send_port(self, port: int) -> None:
        """One message for each of the others; all of them fit into the pipe at once."""
        message = str(port).zfill(_PORT_BYTES).encode() * (self.token.world_size - 1)
        if self.token.port_fd is not None:
            os.write(self.token.port_fd, message)
            os.close(self.token.port_fd)

    def _receive_port(self) -> int:
        if self.token.port_fd is None:
            raise RuntimeError("The launch token has neither a store port nor a pipe to receive one. This is a bug.")
        message = os.read(self.token.port_fd, _PORT_BYTES)
        os.close(self.token.port_fd)
        if len(message) < _PORT_BYTES:
            raise RuntimeError(
                f"Rank {self.token.rank} waited to meet the others, but rank 0 is gone:"
                " it ended before it opened the store."
            )
        return int(message)
