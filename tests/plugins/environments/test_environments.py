# SPDX-License-Identifier: Apache-2.0
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from typing_extensions import override

from fabric.plugins.environments import (
    ClusterEnvironment,
    Fact,
    LaunchedEnvironment,
    LightningEnvironment,
    LocalEnvironment,
    PlainEnvironment,
    Sizes,
    TorchElasticEnvironment,
    detect_environment,
)
from fabric.processes.token import LaunchToken

SECOND = timedelta(seconds=10)
ELASTIC = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
}
MEET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
LOOP = {**MEET, "RANK": "3", "WORLD_SIZE": "4"}
NODE = {**MEET, "NODE_RANK": "1", "WORLD_SIZE": "4"}


def token(**changes: Any) -> LaunchToken:
    facts: dict[str, Any] = {
        "launcher_pid": 9,
        "launcher": "rank 0",
        "cluster": "local",
        "rank": 3,
        "local_rank": 1,
        "node_rank": 1,
        "world_size": 4,
        "local_world_size": 2,
        "store_host": "127.0.0.1",
        "store_port": 0,
        "port_fd": None,
        "death_fd": None,
        "records": "",
    }
    return LaunchToken(**{**facts, **changes})


def place(environment: ClusterEnvironment) -> tuple[int, ...]:
    """World size, local world size, machines; then global, local and node rank."""
    return (
        environment.world_size(),
        environment.local_world_size(),
        environment.num_nodes(),
        environment.global_rank(),
        environment.local_rank(),
        environment.node_rank(),
    )


def without(environ: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({}, LocalEnvironment),
        (ELASTIC, TorchElasticEnvironment),
        (LOOP, PlainEnvironment),
        (NODE, PlainEnvironment),
        ({**MEET, "NODE_RANK": "0"}, PlainEnvironment),
        ({"RANK": "0", "WORLD_SIZE": "1"}, PlainEnvironment),
        ({**MEET, "WORLD_SIZE": "2"}, PlainEnvironment),
        ({"FABRIC_NODE_RANK": "1"}, PlainEnvironment),
        ({"FABRIC_MAIN_ADDRESS": "10.0.0.1"}, PlainEnvironment),
        ({"FABRIC_MAIN_PORT": "29500"}, PlainEnvironment),
        # One variable alone is a leftover.
        (MEET, LocalEnvironment),
        ({"RANK": "1"}, LocalEnvironment),
        ({"WORLD_SIZE": "2"}, LocalEnvironment),
        ({"NODE_RANK": "1"}, LocalEnvironment),
        ({"LOCAL_RANK": "1"}, LocalEnvironment),
        ({"MASTER_ADDR": "", "RANK": "", "WORLD_SIZE": "2"}, LocalEnvironment),
    ],
)
def test_detection(environ: dict[str, str], kind: type[ClusterEnvironment]) -> None:
    before = dict(environ)
    assert type(detect_environment(environ)) is kind
    assert environ == before


@pytest.mark.parametrize("kind", [TorchElasticEnvironment, PlainEnvironment])
def test_detection_of_this_process(kind: type[ClusterEnvironment], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ELASTIC:
        monkeypatch.delenv(name, raising=False)
    assert not kind.detect()
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    assert kind.detect()
    assert TorchElasticEnvironment().global_rank() == PlainEnvironment().global_rank() == 3


def test_local() -> None:
    environment = LocalEnvironment(3)
    assert LightningEnvironment is LocalEnvironment
    assert (environment.name, environment.evidence) == ("local", "no cluster detected")
    assert not environment.creates_processes_externally
    assert place(environment) == (3, 3, 1, 0, 0, 0)
    assert place(LocalEnvironment()) == (1, 1, 1, 0, 0, 0)
    assert place(LocalEnvironment().sized(local_world_size=2, num_nodes=None)) == (2, 2, 1, 0, 0, 0)
    assert environment.sizes() == Sizes(local_world_size=Fact(3, "LocalEnvironment(3)"))
    assert LocalEnvironment().sizes() == Sizes()
    assert place(pickle.loads(pickle.dumps(environment))) == place(environment)


def test_local_refuses_machines() -> None:
    message = (
        "`num_nodes=2` needs to know where the machines meet, and nothing says so. On each machine set `MASTER_ADDR`"
        " and `MASTER_PORT` (the first machine), `NODE_RANK` (0 to 1) and run the same command, or start the script"
        " with `torchrun`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LocalEnvironment().sized(local_world_size=2, num_nodes=2)


def test_local_store() -> None:
    environment, another_job = LocalEnvironment(2), LocalEnvironment(2)
    message = "`LocalEnvironment.main_port` is known once the store is open. Call `create_store(timeout)` first."
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        _ = environment.main_port
    store = environment.create_store(SECOND)
    assert environment.create_store(SECOND) is store
    store.set("key", "value")
    client = TCPStore(environment.main_address, environment.main_port, is_master=False, timeout=SECOND)
    assert client.get("key") == b"value"
    another_job.create_store(SECOND)
    assert another_job.main_port != environment.main_port
    environment.teardown()
    assert environment.create_store(SECOND) is store


def test_each_process_group_has_keys_of_its_own() -> None:
    """Also where a rank, as the launcher's rank 0, has opened the store before it joins."""
    host = LocalEnvironment(2)
    host.create_store(SECOND)
    other = LaunchedEnvironment(token(rank=1, store_port=host.main_port))
    for value in ("first", "second"):
        joined = host.join(SECOND)
        assert not joined.check(["key"])
        joined.set("key", value)
        assert other.join(SECOND).get("key") == value.encode()


def test_torchelastic() -> None:
    environ = dict(ELASTIC)
    environment = TorchElasticEnvironment(environ)
    environ.clear()
    assert environment.creates_processes_externally
    assert (environment.name, environment.started_by) == ("torchelastic", "torchrun")
    assert environment.evidence == "TORCHELASTIC_RUN_ID (torchrun)"
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 29500)
    assert place(environment) == (4, 2, 2, 3, 1, 1)
    assert environment.sizes() == Sizes(
        world_size=Fact(4, "WORLD_SIZE=4 (torchrun)"),
        local_world_size=Fact(2, "LOCAL_WORLD_SIZE=2 (torchrun)"),
        num_nodes=Fact(2, "GROUP_WORLD_SIZE=2 (torchrun)"),
    )
    assert environment.sized(local_world_size=2, num_nodes=2) is environment


@pytest.mark.parametrize("name", [name for name in ELASTIC if name != "TORCHELASTIC_RUN_ID"])
def test_torchelastic_names_what_is_missing(name: str) -> None:
    message = f"The variable `{name}` of torchrun is not set. Set `{name}`, or start the job with torchrun."
    for environ in (without(ELASTIC, name), {**ELASTIC, name: " "}):
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            TorchElasticEnvironment(environ)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "x"}, "`RANK=x` is not a number. Set `RANK` to a number of at least 0."),
        ({"WORLD_SIZE": "0"}, "`WORLD_SIZE=0` is too small. Set `WORLD_SIZE` to a number of at least 1."),
        ({"RANK": "-1"}, "`RANK=-1` is too small. Set `RANK` to a number of at least 0."),
        (
            {"RANK": "4"},
            "`RANK=4` contradicts `WORLD_SIZE=4`: `RANK` counts from 0 to 3. Correct one of the two variables.",
        ),
        (
            {"LOCAL_RANK": "2"},
            "`LOCAL_RANK=2` contradicts `LOCAL_WORLD_SIZE=2`: `LOCAL_RANK` counts from 0 to 1."
            " Correct one of the two variables.",
        ),
        (
            {"GROUP_RANK": "7"},
            "`GROUP_RANK=7` contradicts `GROUP_WORLD_SIZE=2`: `GROUP_RANK` counts from 0 to 1."
            " Correct one of the two variables.",
        ),
    ],
)
def test_torchelastic_refuses(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TorchElasticEnvironment({**ELASTIC, **changes})


def test_torchelastic_without_agent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of PyTorch reads this process's variables; rank 0 then hosts the store itself."""
    one = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    one |= {"GROUP_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name, value in one.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = TorchElasticEnvironment().create_store(SECOND)
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.ranks
def test_torchelastic_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "from datetime import timedelta\n"
        "from fabric.plugins.environments import TorchElasticEnvironment\n"
        "assert TorchElasticEnvironment.detect()\n"
        "environment = TorchElasticEnvironment()\n"
        "rank, size = environment.global_rank(), environment.world_size()\n"
        "store = environment.create_store(timedelta(seconds=30))\n"
        "store.set(f'from {rank}', 'hello')\n"
        "assert store.get(f'from {(rank + 1) % size}') == b'hello'\n"
        "print(f'rank {rank} of {size}\\n', end='', flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize(
    ("environ", "local", "nodes", "expected"),
    [
        # A shell loop: every rank is a process.
        (LOOP, 4, 1, (4, 4, 1, 3, 3, 0)),
        (LOOP, 2, 2, (4, 2, 2, 3, 1, 1)),
        ({**LOOP, "LOCAL_RANK": "3"}, 4, 1, (4, 4, 1, 3, 3, 0)),
        ({**LOOP, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 2, 2, (4, 2, 2, 3, 1, 1)),
        ({**LOOP, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, 1, 4, (4, 1, 4, 3, 0, 3)),
        ({**LOOP, "LOCAL_RANK": "1", "NODE_RANK": "1"}, 2, 2, (4, 2, 2, 3, 1, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1, 1, (1, 1, 1, 0, 0, 0)),
        # One process on each machine, which starts the others.
        (NODE, 2, 2, (4, 2, 2, 2, 0, 1)),
        ({**NODE, "NODE_RANK": "0"}, 2, 2, (4, 2, 2, 0, 0, 0)),
        (without(NODE, "WORLD_SIZE"), 3, 2, (6, 3, 2, 3, 0, 1)),
        ({**MEET, "WORLD_SIZE": "2"}, 2, 1, (2, 2, 1, 0, 0, 0)),
        ({"NODE_RANK": "0", "WORLD_SIZE": "1"}, 1, 1, (1, 1, 1, 0, 0, 0)),
    ],
)
def test_plain(environ: dict[str, str], local: int, nodes: int, expected: tuple[int, ...]) -> None:
    given = PlainEnvironment(environ)
    environment = given.sized(local_world_size=local, num_nodes=nodes)
    assert place(environment) == expected
    assert environment.creates_processes_externally == ("RANK" in environ)
    assert place(pickle.loads(pickle.dumps(environment))) == expected
    assert environment is not given


def test_plain_from_options_of_fabric_run() -> None:
    environ = {"FABRIC_MAIN_ADDRESS": "10.0.0.1", "FABRIC_MAIN_PORT": "29500", "FABRIC_NODE_RANK": "1"}
    environment = PlainEnvironment(environ).sized(local_world_size=2, num_nodes=2)
    assert (environment.main_address, environment.main_port, environment.node_rank()) == ("10.0.0.1", 29500, 1)
    assert environment.evidence == "FABRIC_MAIN_ADDRESS, FABRIC_MAIN_PORT, FABRIC_NODE_RANK"
    same = PlainEnvironment({**environ, **NODE})
    assert (same.main_address, same.main_port, same.node_rank()) == ("10.0.0.1", 29500, 1)


def test_plain_before_the_plan() -> None:
    assert PlainEnvironment(NODE).sizes() == Sizes(world_size=Fact(4, "WORLD_SIZE=4 (plain cluster)"))
    assert PlainEnvironment(without(NODE, "WORLD_SIZE")).sizes() == Sizes()
    loop = PlainEnvironment({**LOOP, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert loop.sizes() == Sizes(
        world_size=Fact(4, "WORLD_SIZE=4 (plain cluster)"),
        local_world_size=Fact(2, "LOCAL_WORLD_SIZE=2 (plain cluster)"),
    )
    assert loop.started_by == "a shell loop (RANK=3 is set)"
    assert loop.evidence == "MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {**MEET, "RANK": "1"},
            "The variable `WORLD_SIZE` of the plain cluster is not set: the number of processes of the whole job;"
            " `RANK` is set already. Set `WORLD_SIZE`.",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "The variable `MASTER_ADDR` of the plain cluster is not set: the host on which rank 0 runs."
            " Set `MASTER_ADDR`, or run `fabric run --main-address ...`.",
        ),
        (
            {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1", "WORLD_SIZE": "4"},
            "The variable `MASTER_PORT` of the plain cluster is not set: a free port on the host of rank 0, the same"
            " for every process. Set `MASTER_PORT`, or run `fabric run --main-port ...`.",
        ),
        (
            {**MEET, "WORLD_SIZE": "4"},
            "The variable `NODE_RANK` of the plain cluster is not set: the number of this machine, 0 to 1."
            " Set `NODE_RANK`, or run `fabric run --node-rank ...`.",
        ),
    ],
)
def test_plain_names_what_is_missing(environ: dict[str, str], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        PlainEnvironment(environ).sized(local_world_size=2, num_nodes=2)


def test_plain_needs_a_number_of_machines() -> None:
    message = (
        "The variable `WORLD_SIZE` of the plain cluster is not set: the number of processes on all machines, which"
        " `num_nodes=` gives as well. Set `WORLD_SIZE`."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        PlainEnvironment(without(NODE, "WORLD_SIZE")).sized(local_world_size=2, num_nodes=None)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**MEET, "NODE_RANK": "one"}, "`NODE_RANK=one` is not a number. Set `NODE_RANK` to a number of at least 0."),
        (
            {"FABRIC_NODE_RANK": "one"},
            "`FABRIC_NODE_RANK=one` is not a number. Set `FABRIC_NODE_RANK` to a number of at least 0.",
        ),
        ({**NODE, "MASTER_PORT": "p"}, "`MASTER_PORT=p` is not a number. Set `MASTER_PORT` to a number of at least 0."),
        (
            {**LOOP, "RANK": "4"},
            "`RANK=4` contradicts `WORLD_SIZE=4`: `RANK` counts from 0 to 3. Correct one of the two variables.",
        ),
        (
            {**LOOP, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "`LOCAL_RANK=2` contradicts `LOCAL_WORLD_SIZE=2`: `LOCAL_RANK` counts from 0 to 1."
            " Correct one of the two variables.",
        ),
        (
            {**NODE, "FABRIC_NODE_RANK": "0"},
            "`NODE_RANK=1` contradicts `FABRIC_NODE_RANK=0` (fabric run --node-rank)."
            " Leave one of them out, or make them equal.",
        ),
        (
            {**NODE, "FABRIC_MAIN_ADDRESS": "h"},
            "`MASTER_ADDR=10.0.0.1` contradicts `FABRIC_MAIN_ADDRESS=h` (fabric run --main-address)."
            " Leave one of them out, or make them equal.",
        ),
        (
            {**NODE, "FABRIC_MAIN_PORT": "1"},
            "`MASTER_PORT=29500` contradicts `FABRIC_MAIN_PORT=1` (fabric run --main-port)."
            " Leave one of them out, or make them equal.",
        ),
        (
            {**NODE, "NODE_RANK": "2"},
            "`NODE_RANK=2` is too large for 2 machine(s) with 2 process(es) each. Machines count from 0 to 1.",
        ),
        (
            {**LOOP, "LOCAL_RANK": "0"},
            "`RANK=3` contradicts `LOCAL_RANK=0` on machine 1 with 2 process(es) on each machine, which is rank 2."
            " Set `LOCAL_WORLD_SIZE` to the number of processes on this machine, and `RANK` to"
            " NODE_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK.",
        ),
    ],
)
def test_plain_refuses(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PlainEnvironment(environ).sized(local_world_size=2, num_nodes=2)


def test_plain_store() -> None:
    """Rank 0 hosts the store at the given address, the others go there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    hosts = [PlainEnvironment({**meet, "RANK": rank}).sized(local_world_size=2, num_nodes=1) for rank in "01"]
    stores = [host.create_store(SECOND) for host in hosts]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert [host.create_store(SECOND) for host in hosts] == stores


def test_launched() -> None:
    environment = LaunchedEnvironment(token())
    assert (environment.name, environment.started_by) == ("launched", "rank 0 (pid 9)")
    assert environment.creates_processes_externally
    assert place(environment) == (4, 2, 2, 3, 1, 1)
    source = "started by rank 0 (pid 9)"
    assert environment.sizes() == Sizes(Fact(4, source), Fact(2, source), Fact(2, source))
    assert LaunchedEnvironment(token(store_host="h", store_port=7)).main_address == "h"
    assert LaunchedEnvironment(token(store_host="h", store_port=7)).main_port == 7
    message = "`LaunchedEnvironment.main_port` is known once the store is open. Call `create_store(timeout)` first."
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        _ = environment.main_port
    assert place(pickle.loads(pickle.dumps(environment))) == place(environment)


def test_launched_joins_the_store_of_its_launcher() -> None:
    launcher = LocalEnvironment(4)
    launcher.create_store(SECOND).set("key", "value")
    environment = LaunchedEnvironment(token(store_port=launcher.main_port))
    store = environment.create_store(SECOND)
    assert store.get("key") == b"value"
    assert environment.create_store(SECOND) is store
    environment.teardown()


def test_launched_hands_the_port_on() -> None:
    """Rank 0 opens the store on a free port and writes it to the pipe, once for each of the others."""
    reading, writing = os.pipe()
    found: dict[int, bytes] = {}

    def join(rank: int) -> None:
        environment = LaunchedEnvironment(token(rank=rank, world_size=3, port_fd=os.dup(reading)))
        found[rank] = environment.create_store(SECOND).get("key")
        assert environment.main_port == host.main_port

    host = LaunchedEnvironment(token(rank=0, world_size=3, port_fd=writing))
    others = [threading.Thread(target=join, args=(rank,)) for rank in (1, 2)]
    for thread in others:
        thread.start()
    host.create_store(SECOND).set("key", "value")
    for thread in others:
        thread.join(timeout=30)
    os.close(reading)
    assert found == {1: b"value", 2: b"value"}


def test_launched_notices_that_rank_0_is_gone() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    message = "Rank 3 waited to meet the others, but rank 0 is gone: it ended before it opened the store."
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        LaunchedEnvironment(token(port_fd=reading)).create_store(SECOND)


class _Users(ClusterEnvironment):
    """What a user writes for a cluster of their own."""

    name = "users"

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @override
    def world_size(self) -> int:
        return 4

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
        return 2


def test_an_environment_of_the_users_own() -> None:
    environment = _Users()
    assert not _Users.detect()
    assert place(environment) == (4, 2, 2, 0, 0, 0)
    source = "the `users` environment"
    assert environment.sizes() == Sizes(Fact(4, source), Fact(2, source), Fact(2, source))
    assert (environment.started_by, environment.evidence) == (source, f"{source} detected")
    assert environment.sized(local_world_size=2, num_nodes=2) is environment
    environment.create_store(SECOND).set("key", "value")
    environment.teardown()
