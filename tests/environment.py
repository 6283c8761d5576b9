# SPDX-License-Identifier: Apache-2.0
"""The cluster that the ranks of `tests.ranks` form; also an example of a user's own `ClusterEnvironment`."""

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import Store

from fabric.plugins.environments import ClusterEnvironment

if TYPE_CHECKING:
    from tests.ranks import RankContext


class RanksEnvironment(ClusterEnvironment):
    """Every rank is already a process of this machine; they meet through a file."""

    name = "tests"

    def __init__(self, context: "RankContext") -> None:
        self._context = context

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> bool:
        return False

    def world_size(self) -> int:
        return self._context.world_size

    def local_world_size(self) -> int:
        return self._context.world_size

    def num_nodes(self) -> int:
        return 1

    def global_rank(self) -> int:
        return self._context.rank

    def local_rank(self) -> int:
        return self._context.rank

    def node_rank(self) -> int:
        return 0

    def create_store(self, timeout: timedelta) -> Store:
        return self._context.create_store(timeout)

    def teardown(self) -> None:
        pass
