# SPDX-License-Identifier: Apache-2.0
"""What the tests of the plan share: machines and clusters written by hand."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from fabric.accelerators import Inventory
from fabric.plan import Arguments, Plan, resolve
from fabric.processes.token import LaunchToken

LAPTOP = Inventory(cpu_cores=8)
MAC = Inventory(cpu_cores=8, mps_devices=1, platform="darwin")
SERVER = Inventory(cpu_cores=16, cuda_devices=4)
NOTEBOOK = Inventory(cpu_cores=8, interactive=True)
WINDOWS = Inventory(cpu_cores=8, platform="win32")

MEET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **MEET,
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
}
LOOP = {**MEET, "RANK": "1", "WORLD_SIZE": "4"}
NODE = {**MEET, "NODE_RANK": "1", "WORLD_SIZE": "4"}


def launched(**changes: Any) -> dict[str, str]:
    """The variable of rank 1 of 2, started by process 9; `CHILD` is a machine on which that is the parent."""
    facts: dict[str, Any] = {
        "launcher_pid": 9,
        "launcher": "rank 0",
        "cluster": "local",
        "rank": 1,
        "local_rank": 1,
        "node_rank": 0,
        "world_size": 2,
        "local_world_size": 2,
        "store_host": "127.0.0.1",
        "store_port": 29500,
        "port_fd": None,
        "death_fd": None,
        "records": "",
    }
    return LaunchToken(**{**facts, **changes}).to_environ()


CHILD = Inventory(cpu_cores=8, pid=10, parent_pid=9)


def plan(environ: Mapping[str, str] | None = None, inventory: Inventory = LAPTOP, **arguments: Any) -> Plan:
    """Resolve under a mapping that nothing can write to."""
    return resolve(Arguments(**arguments), MappingProxyType(dict(environ or {})), inventory)


def refused(
    error: type[Exception],
    message: str,
    environ: Mapping[str, str] | None = None,
    inventory: Inventory = LAPTOP,
    **arguments: Any,
) -> None:
    """Check the error that `plan` raises, its whole text."""
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        plan(environ, inventory, **arguments)
