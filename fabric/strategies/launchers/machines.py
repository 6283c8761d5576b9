# SPDX-License-Identifier: Apache-2.0
"""Several machines: a store client waits for the failure of any of them, so that all end together."""

import json
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from fabric.plugins.environments import ClusterEnvironment
from fabric.processes.mailbox import Elsewhere, Mailbox, Remote
from fabric.processes.record import host_name
from fabric.processes.token import LaunchToken
from fabric.processes.verdict import Failure

_FIRST = "fabric/first_failure"
_LEFT = "fabric/left"
# The system's timeouts are 32-bit milliseconds in places.
_FOR_EVER = timedelta(days=20)
_SOON = timedelta(seconds=5)
_AT_ONCE = timedelta(seconds=1)
_WELL = "well"


def _end_key(node_rank: int) -> str:
    return f"fabric/end/{node_rank}"


def _heard_key(node_rank: int) -> str:
    return f"fabric/heard/{node_rank}"


class Machines:
    """This machine's tie to the others.

    A thread with a store client of its own (one that threads share would block) waits for the key that says how the
    job ended: for everybody, when the last machine has come to its end, or with the first failure.

    Args:
        address: Where rank 0's store listens.
        port: Its port.
        node_rank: This machine.
        num_nodes: How many there are.
        mailbox: Where `Remote` failures, and `Elsewhere` for a good end, are put.
    """

    def __init__(self, address: str, port: int, *, node_rank: int, num_nodes: int, mailbox: Mailbox) -> None:
        self._address = address
        self._port = port
        self._node_rank = node_rank
        self._num_nodes = num_nodes
        self._mailbox = mailbox
        self._leaving = False
        self._lost_store = False
        self._thread = threading.Thread(target=self._wait, name="fabric-machines", daemon=True)

    @classmethod
    def of(cls, environment: ClusterEnvironment, mailbox: Mailbox) -> "Machines":
        return cls(
            environment.main_address,
            environment.main_port,
            node_rank=environment.node_rank(),
            num_nodes=environment.num_nodes(),
            mailbox=mailbox,
        )

    def start(self) -> None:
        """Begin to wait. The store may come later."""
        self._thread.start()

    def leave(self) -> None:
        """This machine has come to its end; the last one to do so tells all."""
        self._leaving = True
        try:
            store = _connect(self._address, self._port, _SOON)
            if store.add(_LEFT, 1) == self._num_nodes:
                for node_rank in range(self._num_nodes):
                    store.set(_end_key(node_rank), _WELL)
        except RuntimeError:
            self._mailbox.put(Elsewhere())

    def settle(self, failure: Failure) -> Failure:
        """Tell the others of a failure of this machine's. The first one that was told counts for the whole job."""
        if self._lost_store:
            return failure
        try:
            store = _connect(self._address, self._port, _AT_ONCE if self._node_rank == 0 else _SOON)
            first = _announce(store, failure, self._num_nodes)
            store.set(_heard_key(self._node_rank), "")
            if self._node_rank == 0:
                self._wait_until_heard(store)
        except RuntimeError:
            return failure
        return first

    def close(self) -> None:
        """Let the waiting thread end, which it does at any end of the job; Python must not end while it is in C++."""
        self._thread.join(1.0)

    def _wait_until_heard(self, store: TCPStore) -> None:
        """The store ends with this machine: give the others a second to read what is in it."""
        end = time.monotonic() + 1.0
        while not store.check([_heard_key(node_rank) for node_rank in range(self._num_nodes)]):
            if time.monotonic() > end:
                return
            time.sleep(0.02)

    def _wait(self) -> None:
        try:
            store = _connect(self._address, self._port, _FOR_EVER)
            store.wait([_end_key(self._node_rank)], _FOR_EVER)
            content = store.get(_end_key(self._node_rank))
        except RuntimeError:
            self._lost_store = True
            self._mailbox.put(Elsewhere() if self._leaving else Remote(self._failure_of_host()))
            return
        self._mailbox.put(Elsewhere() if content.decode() == _WELL else Remote(_read(content)))

    def _failure_of_host(self) -> Failure:
        how = "its store does not answer any more, so that machine or its rank 0 is gone"
        return Failure(0, self._address, 0, 1, how)


def announce_lost_machine(token: LaunchToken) -> None:
    """In a rank whose launcher is gone: tell the other machines, where there are any."""
    if token.world_size == token.local_world_size or token.node_rank == 0:  # there, the store is gone as well
        return
    rank = token.rank - token.local_rank
    failure = Failure(rank, host_name(), token.launcher_pid, 1, "its process is gone")
    try:
        store = _connect(token.store_host, token.store_port, _AT_ONCE)
        _announce(store, failure, token.world_size // token.local_world_size)
    except RuntimeError:
        pass


def _announce(store: Any, failure: Failure, num_nodes: int) -> Failure:
    own = json.dumps(failure._asdict())
    content = store.compare_set(_FIRST, "", own)
    for node_rank in range(num_nodes):
        store.set(_end_key(node_rank), content)
    return _read(content)


def _read(content: bytes) -> Failure:
    return Failure(**json.loads(content))


def _connect(address: str, port: int, timeout: timedelta) -> TCPStore:
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
