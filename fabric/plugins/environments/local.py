# SPDX-License-Identifier: Apache-2.0
"""One machine, on which Fabric starts the ranks itself."""

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__
from typing_extensions import Self, override

from fabric.plugins.environments.environment import ClusterEnvironment, Fact, Sizes

_ADDRESS = "127.0.0.1"


class LocalEnvironment(ClusterEnvironment):
    """This process is rank 0 of one machine; Fabric starts the other ranks.

    Args:
        local_world_size: Number of processes; None leaves it to `Fabric(devices=...)`.
    """

    name = "local"

    def __init__(self, local_world_size: int | None = None) -> None:
        self._local_world_size = local_world_size
        self._store: TCPStore | None = None

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return False

    @property
    @override
    def main_address(self) -> str:
        return _ADDRESS

    @property
    @override
    def main_port(self) -> int:
        """The port that the store got from the system: no two jobs on one machine can meet there."""
        if self._store is None:
            raise RuntimeError(
                "`LocalEnvironment.main_port` is known once the store is open. Call `create_store(timeout)` first."
            )
        return self._store.port

    @classmethod
    @override
    def detect(cls, environ: Mapping[str, str] | None = None) -> bool:
        return True

    @property
    @override
    def evidence(self) -> str:
        return "no cluster detected"

    @override
    def world_size(self) -> int:
        return self._local_world_size or 1

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0

    @override
    def local_world_size(self) -> int:
        return self._local_world_size or 1

    @override
    def sizes(self) -> Sizes:
        size = self._local_world_size
        return Sizes(local_world_size=None if size is None else Fact(size, f"LocalEnvironment({size})"))

    @override
    def sized(self, *, local_world_size: int, num_nodes: int | None) -> Self:
        if num_nodes is not None and num_nodes > 1:
            raise ValueError(
                f"`num_nodes={num_nodes}` needs to know where the machines meet, and nothing says so."
                f" On each machine set `MASTER_ADDR` and `MASTER_PORT` (the first machine), `NODE_RANK` (0 to"
                f" {num_nodes - 1}) and run the same command, or start the script with `torchrun`."
            )
        return type(self)(local_world_size)

    @override
    def create_store(self, timeout: timedelta) -> Store:
        if self._store is None:
            self._store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return self._store
