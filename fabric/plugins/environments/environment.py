# SPDX-License-Identifier: Apache-2.0
"""The base of the cluster environments: who this process is in the job, and where the ranks meet."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar, NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__
from typing_extensions import Self


class Fact(NamedTuple):
    """A number that the cluster gives, and where it stands: `Fact(8, "WORLD_SIZE=8 (torchrun)")`."""

    value: int
    source: str


class Sizes(NamedTuple):
    """What a cluster says about the size of the job; None where it says nothing and the plan decides."""

    world_size: Fact | None = None
    local_world_size: Fact | None = None
    num_nodes: Fact | None = None


class ClusterEnvironment(ABC):
    """Who this process is in the job, and where its ranks meet.

    An environment reads its variables once, in its constructor, and never writes any. One of your own answers the
    abstract methods; where its scheduler starts one process per machine and Fabric starts the rest, it also overrides
    `sizes` and `sized`.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """True where every rank is a process already; False where Fabric starts the other ranks of this machine."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """Host on which rank 0 opens the rendezvous store."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port of the rendezvous store."""

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> bool:
        """Whether this process runs in such a cluster. An environment that is only passed in `plugins=` needs none."""
        return False

    @abstractmethod
    def world_size(self) -> int:
        """Processes of the whole job."""

    @abstractmethod
    def global_rank(self) -> int:
        """Number of this process in the job."""

    @abstractmethod
    def local_rank(self) -> int:
        """Number of this process on its machine."""

    @abstractmethod
    def node_rank(self) -> int:
        """Number of this machine."""

    @abstractmethod
    def local_world_size(self) -> int:
        """Processes on this machine."""

    def num_nodes(self) -> int:
        """Machines of the job. Override it where they run different numbers of processes."""
        return self.world_size() // self.local_world_size()

    def sizes(self) -> Sizes:
        """What this environment says about the size of the job. Asked once, while the plan is made."""
        source = f"the `{self.name}` environment"
        return Sizes(
            world_size=Fact(self.world_size(), source),
            local_world_size=Fact(self.local_world_size(), source),
            num_nodes=Fact(self.num_nodes(), source),
        )

    def sized(self, *, local_world_size: int, num_nodes: int | None) -> Self:
        """This environment with the sizes that the plan settled on, where `sizes` left some open.

        Args:
            local_world_size: Processes on this machine.
            num_nodes: Machines; None where neither the user nor `sizes` says how many.
        """
        return self

    @property
    def evidence(self) -> str:
        """What `detect` found, for messages."""
        return f"the `{self.name}` environment detected"

    @property
    def started_by(self) -> str:
        """Who started the ranks, where `creates_processes_externally`; for messages."""
        return f"the `{self.name}` environment"

    def join(self, timeout: timedelta) -> Store:
        """The store for the next process group of this job. Called once on every rank for each process group.

        Keys that an earlier process group left in the same store make Gloo connect to addresses that are gone, so each
        group has keys of its own, by the number of times that this rank has joined.

        Args:
            timeout: How long a rank waits for the others.
        """
        store = self.create_store(timeout)
        joins = store.add(f"fabric/joins/{self.global_rank()}", 1)
        return PrefixStore(f"fabric/{joins}", store)

    def create_store(self, timeout: timedelta) -> Store:
        """The store through which the ranks find each other; the same one each time, where this process keeps it.

        Args:
            timeout: How long a rank waits for the others.
        """
        return TCPStore(
            self.main_address,
            self.main_port,
            is_master=self.global_rank() == 0,
            wait_for_workers=False,
            timeout=timeout,
        )

    def teardown(self) -> None:
        """Runs once on every rank, when it leaves the process group. A store that this process hosts stays open: other
        machines still listen to it for news of a failure, and a later launch meets there again."""
