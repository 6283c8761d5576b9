# SPDX-License-Identifier: Apache-2.0
"""Machines that know of each other through a few variables, with no scheduler between them."""

import copy
import os
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its __all__
from typing_extensions import Self, override

from fabric.plugins.environments.environment import ClusterEnvironment, Fact, Sizes
from fabric.plugins.environments.variables import read_optional_number, to_number, validate_below

# What `fabric run` calls each variable, and the option that sets it.
_FLAGS = {
    "MASTER_ADDR": ("FABRIC_MAIN_ADDRESS", "--main-address"),
    "MASTER_PORT": ("FABRIC_MAIN_PORT", "--main-port"),
    "NODE_RANK": ("FABRIC_NODE_RANK", "--node-rank"),
}
_NAMES = (*_FLAGS, *(flag for flag, _ in _FLAGS.values()), "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class PlainEnvironment(ClusterEnvironment):
    """One of several machines, or one of several processes, described by hand.

    With `RANK` set, every rank is a process already (a shell loop): `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`,
    and where useful `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `NODE_RANK`. (Where each process sees only its own GPU, set
    `LOCAL_RANK=0` and `LOCAL_WORLD_SIZE=1`.) Without it, this is the first process of machine
    `NODE_RANK`, and Fabric starts the others; `WORLD_SIZE` then counts the processes of all machines, and may be left
    out where `Fabric(num_nodes=...)` is given. `fabric run --node-rank --main-address --main-port` say the same.

    Args:
        environ: Where to read the variables; None for this process's own.

    Raises:
        RuntimeError: Where a variable is missing.
        ValueError: Where one is not a number, or two contradict each other.
    """

    name = "plain"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._evidence = ", ".join(name for name in _NAMES if environ.get(name))
        self._rank = read_optional_number(environ, "RANK")
        self._total = read_optional_number(environ, "WORLD_SIZE", minimum=1)
        self._address, _ = _read_either(environ, "MASTER_ADDR")
        port, port_name = _read_either(environ, "MASTER_PORT")
        self._port = to_number(port, port_name, minimum=0) if port else None
        node_rank, self._node_rank_name = _read_either(environ, "NODE_RANK")
        self._node_rank = to_number(node_rank, self._node_rank_name, minimum=0) if node_rank else None
        self._local_rank: int | None = None
        self._local_total: int | None = None
        if self._rank is not None:
            self._local_rank = read_optional_number(environ, "LOCAL_RANK")
            self._local_total = read_optional_number(environ, "LOCAL_WORLD_SIZE", minimum=1)
            self._validate_rank(self._rank)
        self._num_nodes: int | None = None
        self._store: Store | None = None

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return self._rank is not None

    @property
    @override
    def main_address(self) -> str:
        if not self._address:
            raise _missing("MASTER_ADDR", "the host on which rank 0 runs")
        return self._address

    @property
    @override
    def main_port(self) -> int:
        if self._port is None:
            raise _missing("MASTER_PORT", "a free port on the host of rank 0, the same for every process")
        return self._port

    @classmethod
    @override
    def detect(cls, environ: Mapping[str, str] | None = None) -> bool:
        """True for an option of `fabric run`, or for two of: an address, a number of processes, a rank.

        One variable alone is a leftover rather than a cluster; two are taken seriously, and a missing one is an error.
        """
        environ = os.environ if environ is None else environ
        if any(environ.get(flag) for flag, _ in _FLAGS.values()):
            return True
        said = (environ.get("MASTER_ADDR"), environ.get("WORLD_SIZE"), environ.get("RANK") or environ.get("NODE_RANK"))
        return sum(map(bool, said)) >= 2

    @property
    @override
    def evidence(self) -> str:
        return self._evidence

    @property
    @override
    def started_by(self) -> str:
        return f"a shell loop (RANK={self._rank} is set)"

    @override
    def world_size(self) -> int:
        if self._total is not None:
            return self._total
        return self.local_world_size() * (self._num_nodes or 1)

    @override
    def global_rank(self) -> int:
        if self._rank is not None:
            return self._rank
        return self.node_rank() * self.local_world_size()

    @override
    def local_rank(self) -> int:
        if self._rank is None:
            return 0
        return self._rank % self.local_world_size() if self._local_rank is None else self._local_rank

    @override
    def node_rank(self) -> int:
        if self._node_rank is not None:
            return self._node_rank
        return 0 if self._rank is None else self._rank // self.local_world_size()

    @override
    def local_world_size(self) -> int:
        if self._local_total is not None:
            return self._local_total
        return 1 if self._rank is None or self._total is None else self._total

    @override
    def num_nodes(self) -> int:
        return self._num_nodes or super().num_nodes()

    @override
    def sizes(self) -> Sizes:
        return Sizes(
            world_size=_fact("WORLD_SIZE", self._total),
            local_world_size=_fact("LOCAL_WORLD_SIZE", self._local_total),
        )

    @override
    def sized(self, *, local_world_size: int, num_nodes: int | None) -> Self:
        sized = copy.copy(self)
        sized._local_total = local_world_size
        sized._num_nodes = num_nodes
        if num_nodes is None:
            raise _missing("WORLD_SIZE", "the number of processes on all machines, which `num_nodes=` gives as well")
        sized._validate_place()
        return sized

    @override
    def create_store(self, timeout: timedelta) -> Store:
        if self._store is None:
            self._store = super().create_store(timeout)
        return self._store

    def _validate_rank(self, rank: int) -> None:
        if self._total is None:
            raise _missing("WORLD_SIZE", "the number of processes of the whole job; `RANK` is set already")
        validate_below(rank, "RANK", self._total, "WORLD_SIZE")
        if self._local_rank is not None and self._local_total is not None:
            validate_below(self._local_rank, "LOCAL_RANK", self._local_total, "LOCAL_WORLD_SIZE")

    def _validate_place(self) -> None:
        """Once the sizes are settled: is there a meeting place, and do the ranks fit together?"""
        if self.world_size() > 1:
            _ = self.main_address, self.main_port
        if self._rank is not None:
            self._validate_local_rank(self._rank)
        elif self.num_nodes() > 1 and self._node_rank is None:
            raise _missing("NODE_RANK", f"the number of this machine, 0 to {self.num_nodes() - 1}")
        elif self.node_rank() >= self.num_nodes():
            raise ValueError(
                f"`{self._node_rank_name}={self.node_rank()}` is too large for {self.num_nodes()} machine(s) with"
                f" {self.local_world_size()} process(es) each. Machines count from 0 to {self.num_nodes() - 1}."
            )

    def _validate_local_rank(self, rank: int) -> None:
        size = self.local_world_size()
        if rank != self.node_rank() * size + self.local_rank():
            place = f"`LOCAL_RANK={self.local_rank()}` on machine {self.node_rank()}"
            raise ValueError(
                f"`RANK={rank}` contradicts {place} with {size} process(es) on each machine, which is rank"
                f" {self.node_rank() * size + self.local_rank()}. Set `LOCAL_WORLD_SIZE` to the number of processes on"
                f" this machine, and `RANK` to NODE_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK."
            )


def _fact(name: str, value: int | None) -> Fact | None:
    return None if value is None else Fact(value, f"{name}={value} (plain cluster)")


def _read_either(environ: Mapping[str, str], name: str) -> tuple[str, str]:
    """The value of a variable or of the option of `fabric run` for it, and the name of the one that is set."""
    flag, option = _FLAGS[name]
    plain, flagged = environ.get(name, "").strip(), environ.get(flag, "").strip()
    if plain and flagged and plain != flagged:
        raise ValueError(
            f"`{name}={plain}` contradicts `{flag}={flagged}` (fabric run {option})."
            " Leave one of them out, or make them equal."
        )
    return (flagged, flag) if flagged else (plain, name)


def _missing(name: str, meaning: str) -> RuntimeError:
    option = f", or run `fabric run {_FLAGS[name][1]} ...`" if name in _FLAGS else ""
    return RuntimeError(f"The variable `{name}` of the plain cluster is not set: {meaning}. Set `{name}`{option}.")
