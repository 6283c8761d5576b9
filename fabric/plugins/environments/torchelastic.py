# SPDX-License-Identifier: Apache-2.0
"""Ranks that `torchrun` (PyTorch's elastic agent) started."""

import os
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.distributed.rendezvous import rendezvous
from typing_extensions import override

from fabric.plugins.environments.environment import ClusterEnvironment, Fact, Sizes
from fabric.plugins.environments.variables import read_number, read_optional_number, read_required, validate_below


class TorchElasticEnvironment(ClusterEnvironment):
    """A rank of `torchrun`, described by the variables that its agent sets.

    Args:
        environ: Where to read them; None for this process's own.

    Raises:
        RuntimeError: Where one of them is missing.
        ValueError: Where one is not a number, or two contradict each other.
    """

    name = "torchelastic"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._main_address = read_required(environ, "MASTER_ADDR", whose="torchrun")
        self._main_port = read_number(environ, "MASTER_PORT", whose="torchrun")
        self._world_size = read_number(environ, "WORLD_SIZE", whose="torchrun", minimum=1)
        self._local_world_size = read_number(environ, "LOCAL_WORLD_SIZE", whose="torchrun", minimum=1)
        self._num_nodes = read_number(environ, "GROUP_WORLD_SIZE", whose="torchrun", minimum=1)
        self._global_rank = read_number(environ, "RANK", whose="torchrun")
        self._local_rank = read_number(environ, "LOCAL_RANK", whose="torchrun")
        self._node_rank = read_number(environ, "GROUP_RANK", whose="torchrun")
        self._store: Store | None = None
        self._attempt = read_optional_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0
        validate_below(self._global_rank, "RANK", self._world_size, "WORLD_SIZE")
        validate_below(self._local_rank, "LOCAL_RANK", self._local_world_size, "LOCAL_WORLD_SIZE")
        validate_below(self._node_rank, "GROUP_RANK", self._num_nodes, "GROUP_WORLD_SIZE")

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self._main_address

    @property
    @override
    def main_port(self) -> int:
        return self._main_port

    @classmethod
    @override
    def detect(cls, environ: Mapping[str, str] | None = None) -> bool:
        return "TORCHELASTIC_RUN_ID" in (os.environ if environ is None else environ)

    @property
    @override
    def evidence(self) -> str:
        return "TORCHELASTIC_RUN_ID (torchrun)"

    @property
    @override
    def started_by(self) -> str:
        return "torchrun"

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def global_rank(self) -> int:
        return self._global_rank

    @override
    def local_rank(self) -> int:
        return self._local_rank

    @override
    def node_rank(self) -> int:
        return self._node_rank

    @override
    def local_world_size(self) -> int:
        return self._local_world_size

    @override
    def num_nodes(self) -> int:
        return self._num_nodes

    @override
    def sizes(self) -> Sizes:
        return Sizes(
            world_size=Fact(self._world_size, f"WORLD_SIZE={self._world_size} (torchrun)"),
            local_world_size=Fact(self._local_world_size, f"LOCAL_WORLD_SIZE={self._local_world_size} (torchrun)"),
            num_nodes=Fact(self._num_nodes, f"GROUP_WORLD_SIZE={self._num_nodes} (torchrun)"),
        )

    @override
    def create_store(self, timeout: timedelta) -> Store:
        """The agent's own store where it offers one. It outlives a restart: each attempt has its own keys."""
        if self._store is None:
            store = next(rendezvous("env://", self._global_rank, self._world_size, timeout=timeout))[0]
            self._store = PrefixStore(f"fabric/attempt_{self._attempt}", store)
        return self._store
