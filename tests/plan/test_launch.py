# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from fabric.accelerators import Inventory
from fabric.strategies import DDPStrategy
from tests.plan.cases import (
    CHILD,
    LAPTOP,
    LOOP,
    MEET,
    NODE,
    NOTEBOOK,
    SERVER,
    TORCHRUN,
    WINDOWS,
    launched,
    plan,
    refused,
)


@pytest.mark.parametrize(
    ("environ", "inventory", "arguments", "name", "reason"),
    [
        ({}, LAPTOP, {}, "none", "one process: this one"),
        ({}, SERVER, {"strategy": "dp"}, "none", "one process: this one"),
        ({}, LAPTOP, {"strategy": "ddp"}, "none", "one process: this one"),
        ({}, LAPTOP, {"devices": 2}, "subprocess", "starts rank 1 of this node; rank 0 is this process"),
        ({}, LAPTOP, {"devices": 4}, "subprocess", "starts ranks 1-3 of this node; rank 0 is this process"),
        (NODE, LAPTOP, {"devices": 2}, "subprocess", "starts rank 3 of this node; rank 2 is this process"),
        (NODE, LAPTOP, {}, "none", "this is the only process of this machine"),
        ({}, LAPTOP, {"devices": 2, "strategy": "ddp_spawn"}, "spawn", "`launch(fn)` starts ranks 0-1 of this node"),
        ({}, LAPTOP, {"devices": 1, "strategy": "ddp_spawn"}, "spawn", "`launch(fn)` starts rank 0 of this node"),
        ({}, LAPTOP, {"devices": 2, "strategy": "ddp_fork"}, "fork", "`launch(fn)` starts ranks 0-1 of this node"),
        ({}, NOTEBOOK, {"devices": 2}, "fork", "`launch(fn)` starts ranks 0-1 of this node"),
        (
            {},
            NOTEBOOK,
            {"devices": 2, "strategy": "ddp_notebook"},
            "fork",
            "`launch(fn)` starts ranks 0-1 of this node",
        ),
        ({}, NOTEBOOK, {"strategy": "ddp"}, "none", "one process: this one"),
        (
            {},
            LAPTOP,
            {"devices": 2, "strategy": DDPStrategy(start_method="forkserver")},
            "forkserver",
            "`launch(fn)` starts ranks 0-1 of this node",
        ),
        (TORCHRUN, LAPTOP, {}, "external", "started by torchrun"),
        (TORCHRUN, LAPTOP, {"strategy": "ddp_spawn"}, "external", "started by torchrun"),
        (TORCHRUN, NOTEBOOK, {"strategy": "ddp"}, "external", "started by torchrun"),
        (LOOP, LAPTOP, {}, "external", "started by a shell loop (RANK=1 is set)"),
        (launched(), CHILD, {}, "external", "started by rank 0 (pid 9)"),
        (launched(launcher="fabric run"), CHILD, {}, "external", "started by fabric run (pid 9)"),
        ({}, WINDOWS, {}, "none", "one process: this one"),
    ],
)
def test_launcher(
    environ: dict[str, str], inventory: Inventory, arguments: dict[str, Any], name: str, reason: str
) -> None:
    choice = plan(environ, inventory, **arguments).launcher
    assert (choice.value, choice.reason) == (name, reason)


@pytest.mark.parametrize(
    ("environ", "arguments", "processes"),
    [({}, {"devices": 2}, 2), (LOOP, {}, 4), ({**MEET, "NODE_RANK": "0", "WORLD_SIZE": "2"}, {}, 2)],
)
def test_windows(environ: dict[str, str], arguments: dict[str, Any], processes: int) -> None:
    message = (
        f"This plan needs {processes} processes, but on Windows Fabric runs one."
        " Write `devices=1` and leave `num_nodes` out, or use the Windows Subsystem for Linux."
    )
    refused(ValueError, message, environ, WINDOWS, **arguments)


@pytest.mark.parametrize(
    ("strategy", "cause"),
    [
        ("ddp", "it runs a script again"),
        ("ddp_find_unused_parameters_true", "it runs a script again"),
        ("ddp_spawn", "its processes import `fn` from a file"),
    ],
)
def test_notebook(strategy: str, cause: str) -> None:
    message = (
        f"`strategy={strategy}` (argument) cannot start 2 processes from a notebook or a prompt: {cause}."
        ' Write `strategy="ddp_notebook"` and `fabric.launch(fn)`, or run a script.'
    )
    refused(ValueError, message, {}, NOTEBOOK, devices=2, strategy=strategy)


@pytest.mark.parametrize(
    ("environ", "inventory", "arguments", "threads", "label", "reason"),
    [
        ({}, LAPTOP, {}, None, "default", "one local rank: PyTorch's own choice"),
        ({}, SERVER, {"strategy": "dp"}, None, "default", "one local rank: PyTorch's own choice"),
        ({}, LAPTOP, {"devices": 2}, 4, "4", "auto: 8 cores for 2 local ranks"),
        ({}, LAPTOP, {"devices": 3}, 2, "2", "auto: 8 cores for 3 local ranks"),
        ({}, LAPTOP, {"devices": 16}, 1, "1", "auto: 8 cores for 16 local ranks"),
        ({}, SERVER, {}, 4, "4", "auto: 16 cores for 4 local ranks"),
        (LOOP, LAPTOP, {}, 2, "2", "auto: 8 cores for 4 local ranks"),
        (NODE, LAPTOP, {"devices": 2}, 4, "4", "auto: 8 cores for 2 local ranks"),
        ({"OMP_NUM_THREADS": "3"}, LAPTOP, {"devices": 2}, None, "3", "OMP_NUM_THREADS=3"),
        ({"OMP_NUM_THREADS": "3"}, LAPTOP, {}, None, "3", "OMP_NUM_THREADS=3"),
        ({"OMP_NUM_THREADS": ""}, LAPTOP, {"devices": 2}, 4, "4", "auto: 8 cores for 2 local ranks"),
    ],
)
def test_threads(
    environ: dict[str, str],
    inventory: Inventory,
    arguments: dict[str, Any],
    threads: int | None,
    label: str,
    reason: str,
) -> None:
    choice = plan(environ, inventory, **arguments).threads
    assert (choice.value, str(choice), choice.reason) == (threads, label, reason)
