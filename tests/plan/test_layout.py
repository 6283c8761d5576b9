# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from fabric.accelerators import Inventory
from fabric.plugins.environments import LocalEnvironment
from tests.plan.cases import CHILD, LAPTOP, LOOP, MEET, NODE, SERVER, TORCHRUN, launched, plan, refused

UNEVEN = {**TORCHRUN, "WORLD_SIZE": "3", "RANK": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
PLAIN_NO_TOTAL = {**MEET, "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "inventory", "arguments", "indices", "reason"),
    [
        ({}, LAPTOP, {}, (0,), "auto: one process on the CPU"),
        ({}, LAPTOP, {"devices": 3}, (0, 1, 2), "argument"),
        ({}, LAPTOP, {"devices": "3"}, (0, 1, 2), "argument"),
        ({}, SERVER, {}, (0, 1, 2, 3), "auto: 4 CUDA devices visible"),
        ({}, SERVER, {"devices": -1}, (0, 1, 2, 3), "argument"),
        ({}, SERVER, {"devices": "-1"}, (0, 1, 2, 3), "argument"),
        ({}, SERVER, {"devices": 2}, (0, 1), "argument"),
        ({}, SERVER, {"devices": [0, 2]}, (0, 2), "argument"),
        ({}, SERVER, {"devices": "0,2"}, (0, 2), "argument"),
        ({}, SERVER, {"devices": "3,"}, (3,), "argument"),
        ({}, SERVER, {"accelerator": "cpu"}, (0,), "auto: one process on the CPU"),
        # One process, on one device or on several.
        ({}, SERVER, {"strategy": "single_device"}, (0,), "auto: `single_device` takes 1"),
        ({}, SERVER, {"strategy": "single_device", "devices": [2]}, (2,), "argument"),
        ({}, SERVER, {"strategy": "dp"}, (0, 1, 2, 3), "auto: 4 CUDA devices visible"),
        ({}, SERVER, {"strategy": "dp", "devices": 2}, (0, 1), "argument"),
        # What was started decides.
        (TORCHRUN, LAPTOP, {}, (0, 1), "LOCAL_WORLD_SIZE=2 (torchrun)"),
        (TORCHRUN, SERVER, {}, (0, 1), "LOCAL_WORLD_SIZE=2 (torchrun)"),
        (TORCHRUN, SERVER, {"devices": 2}, (0, 1), "argument"),
        (TORCHRUN, SERVER, {"devices": [1, 3]}, (1, 3), "argument"),
        (LOOP, LAPTOP, {}, (0, 1, 2, 3), "WORLD_SIZE=4 (plain cluster)"),
        (LOOP, LAPTOP, {"devices": 2}, (0, 1), "argument"),
        (LOOP, LAPTOP, {"num_nodes": 2}, (0, 1), "WORLD_SIZE=4 (plain cluster) over num_nodes=2"),
        (
            {**LOOP, "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            LAPTOP,
            {},
            (0, 1),
            "LOCAL_WORLD_SIZE=2 (plain cluster)",
        ),
        (NODE, LAPTOP, {}, (0,), "auto: one process on the CPU"),
        (NODE, LAPTOP, {"devices": 2}, (0, 1), "argument"),
        (NODE, LAPTOP, {"num_nodes": 2}, (0, 1), "WORLD_SIZE=4 (plain cluster) over num_nodes=2"),
        ({**NODE, "WORLD_SIZE": "8"}, SERVER, {}, (0, 1, 2, 3), "auto: 4 CUDA devices visible"),
        (launched(), CHILD, {}, (0, 1), "started by rank 0 (pid 9)"),
        (launched(), CHILD, {"devices": 2}, (0, 1), "argument"),
        # The same variable in a process whose parent is not the launcher.
        (launched(), LAPTOP, {}, (0,), "auto: one process on the CPU"),
    ],
)
def test_devices(
    environ: dict[str, str], inventory: Inventory, arguments: dict[str, Any], indices: tuple[int, ...], reason: str
) -> None:
    choice = plan(environ, inventory, **arguments).devices
    assert (choice.value, choice.reason) == (indices, reason)


@pytest.mark.parametrize(
    ("devices", "label"), [(2, "2"), ([0, 1], "2"), ([1, 0], "2 (1,0)"), ([2], "1 (2)"), ([0], "1")]
)
def test_the_label_names_devices_that_are_not_the_first(devices: Any, label: str) -> None:
    assert str(plan({}, SERVER, devices=devices).devices) == label


@pytest.mark.parametrize(
    ("environ", "inventory", "arguments", "num_nodes", "world_size", "reason"),
    [
        ({}, LAPTOP, {"devices": 2}, 1, 2, "auto: one machine"),
        ({}, LAPTOP, {"devices": 2, "num_nodes": 1}, 1, 2, "argument"),
        ({}, SERVER, {"strategy": "dp"}, 1, 1, "one process"),
        (TORCHRUN, LAPTOP, {}, 2, 4, "GROUP_WORLD_SIZE=2 (torchrun)"),
        (TORCHRUN, LAPTOP, {"num_nodes": 2}, 2, 4, "argument"),
        (UNEVEN, LAPTOP, {}, 2, 3, "GROUP_WORLD_SIZE=2 (torchrun)"),
        (LOOP, LAPTOP, {}, 1, 4, "WORLD_SIZE=4 over 4 local devices (plain cluster)"),
        (LOOP, LAPTOP, {"devices": 2}, 2, 4, "WORLD_SIZE=4 over 2 local devices (plain cluster)"),
        (LOOP, LAPTOP, {"num_nodes": 2}, 2, 4, "argument"),
        (NODE, LAPTOP, {}, 4, 4, "WORLD_SIZE=4 over 1 local device (plain cluster)"),
        (NODE, LAPTOP, {"devices": 2}, 2, 4, "WORLD_SIZE=4 over 2 local devices (plain cluster)"),
        (NODE, LAPTOP, {"num_nodes": 2, "devices": 2}, 2, 4, "argument"),
        ({**NODE, "WORLD_SIZE": "8"}, SERVER, {}, 2, 8, "WORLD_SIZE=8 over 4 local devices (plain cluster)"),
        (PLAIN_NO_TOTAL, LAPTOP, {"num_nodes": 3, "devices": 2}, 3, 6, "argument"),
        ({**PLAIN_NO_TOTAL, "FABRIC_NUM_NODES": "2"}, LAPTOP, {}, 2, 2, "FABRIC_NUM_NODES=2 (fabric run)"),
        (launched(), CHILD, {}, 1, 2, "started by rank 0 (pid 9)"),
        (launched(launcher="fabric run", world_size=4), CHILD, {}, 2, 4, "started by fabric run (pid 9)"),
    ],
)
def test_num_nodes(
    environ: dict[str, str],
    inventory: Inventory,
    arguments: dict[str, Any],
    num_nodes: int,
    world_size: int,
    reason: str,
) -> None:
    made = plan(environ, inventory, **arguments)
    assert (made.num_nodes.value, made.world_size, made.num_nodes.reason) == (num_nodes, world_size, reason)


@pytest.mark.parametrize(
    ("environ", "inventory", "rank", "local_rank", "node_rank"),
    [
        ({}, LAPTOP, 0, 0, 0),
        (TORCHRUN, LAPTOP, 3, 1, 1),
        (LOOP, LAPTOP, 1, 1, 0),
        ({**NODE, "WORLD_SIZE": "8"}, SERVER, 4, 0, 1),
        (launched(), CHILD, 1, 1, 0),
    ],
)
def test_place(environ: dict[str, str], inventory: Inventory, rank: int, local_rank: int, node_rank: int) -> None:
    environment = plan(environ, inventory).environment.value
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (
        rank,
        local_rank,
        node_rank,
    )


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        # Arguments and what was started.
        (
            TORCHRUN,
            {"devices": 4},
            "`devices=4` (argument) asks for 4 process(es) on this machine, but there are 2:"
            " LOCAL_WORLD_SIZE=2 (torchrun). Leave `devices` out, or make the two equal.",
        ),
        (
            {**TORCHRUN, "FABRIC_DEVICES": "1"},
            {},
            "`FABRIC_DEVICES=1` (fabric run) asks for 1 process(es) on this machine, but there are"
            " 2: LOCAL_WORLD_SIZE=2 (torchrun). Leave `devices` out, or make the two equal.",
        ),
        (
            TORCHRUN,
            {"num_nodes": 1},
            "`num_nodes=1` (argument) asks for 1 machine(s), but there are 2: GROUP_WORLD_SIZE=2 (torchrun)."
            " Leave `num_nodes` out, or make the two equal.",
        ),
        (
            {**LOOP, "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            {"devices": 4},
            "`devices=4` (argument) asks for 4 process(es) on this machine, but there are 2: LOCAL_WORLD_SIZE=2"
            " (plain cluster). Leave `devices` out, or make the two equal.",
        ),
        (
            NODE,
            {"devices": 2, "num_nodes": 4},
            "`devices=2` (argument) asks for 2 process(es) on this machine, but there are 1: WORLD_SIZE=4 (plain"
            " cluster) over num_nodes=4. Leave `devices` out, or make the two equal.",
        ),
        # Numbers that do not divide.
        (
            NODE,
            {"devices": 3},
            "WORLD_SIZE=4 (plain cluster) cannot be divided by the 3 CPU devices of this machine (argument)."
            " Make `WORLD_SIZE` the number of processes on all machines together, or write `devices=` for the number on"
            " each.",
        ),
        (
            NODE,
            {"num_nodes": 3},
            "WORLD_SIZE=4 (plain cluster) cannot be divided by `num_nodes=3`: every machine must run the same number"
            " of processes. Correct one of the two.",
        ),
        (
            LOOP,
            {"num_nodes": 3},
            "WORLD_SIZE=4 (plain cluster) cannot be divided by `num_nodes=3`: every machine must run the same number"
            " of processes. Correct one of the two.",
        ),
        # Machines without a cluster.
        (
            {},
            {"num_nodes": 2},
            "`num_nodes=2` needs to know where the machines meet, and nothing says so. On each machine set"
            " `MASTER_ADDR` and `MASTER_PORT` (the first machine), `NODE_RANK` (0 to 1) and run the same command, or"
            " start the script with `torchrun`.",
        ),
        # The user's own environment.
        (
            {},
            {"devices": 4, "plugins": LocalEnvironment(2)},
            "`devices=4` (argument) asks for 4 process(es) on this machine, but there are 2: LocalEnvironment(2)."
            " Leave `devices` out, or make the two equal.",
        ),
        (
            {},
            {"devices": -1},
            "`devices=-1` asks for all devices, but a machine has one CPU, which any number of processes share."
            " Write the number of processes, such as `devices=8`.",
        ),
    ],
)
def test_refused(environ: dict[str, str], arguments: dict[str, Any], message: str) -> None:
    refused(ValueError, message, environ, **arguments)


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        (
            {},
            {"devices": 5},
            "`devices=5` asks for 5 devices, but 4 CUDA devices are visible."
            " Choose at most 4 devices, with indices from 0 to 3.",
        ),
        (
            {},
            {"devices": [0, 4]},
            "`devices=[0, 4]` names index 4, but 4 CUDA devices are visible."
            " Choose at most 4 devices, with indices from 0 to 3.",
        ),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"},
            {},
            "LOCAL_WORLD_SIZE=8 (torchrun) means 8 processes on this machine, each with a device of its own, but this"
            ' process sees 4 CUDA devices. Start fewer processes on each machine, or write `accelerator="cpu"`.',
        ),
        (
            {},
            {"strategy": "single_device", "devices": 2},
            "`devices=2` asks for 2 devices, but `strategy=single_device` (argument) takes at most 1. Write"
            ' `devices=1`, or choose a strategy for several devices, such as `strategy="ddp"`.',
        ),
        (
            TORCHRUN,
            {"strategy": "dp"},
            "`strategy=dp` (argument) runs in one process, but WORLD_SIZE=4 (torchrun) asks for more."
            ' Choose a strategy for several processes, such as `strategy="ddp"`.',
        ),
        (
            {},
            {"strategy": "dp", "num_nodes": 2},
            "`strategy=dp` (argument) runs in one process, but `num_nodes=2` asks for more."
            ' Choose a strategy for several processes, such as `strategy="ddp"`.',
        ),
        (
            {},
            {"strategy": "single_device", "plugins": LocalEnvironment(2)},
            "`strategy=single_device` (argument) runs in one process, but LocalEnvironment(2) asks for more."
            ' Choose a strategy for several processes, such as `strategy="ddp"`.',
        ),
    ],
)
def test_refused_with_gpus(environ: dict[str, str], arguments: dict[str, Any], message: str) -> None:
    refused(ValueError, message, environ, SERVER, **arguments)


def test_a_rank_of_ours_refuses_another_shape() -> None:
    message = (
        "`devices=4` (argument) asks for 4 process(es) on this machine, but there are 2: started by rank 0 (pid 9)."
        " Leave `devices` out, or make the two equal."
    )
    refused(ValueError, message, launched(), CHILD, devices=4)


def test_a_plain_cluster_without_any_size() -> None:
    message = (
        "The variable `WORLD_SIZE` of the plain cluster is not set: the number of processes on all machines, which"
        " `num_nodes=` gives as well. Set `WORLD_SIZE`."
    )
    refused(RuntimeError, message, PLAIN_NO_TOTAL)
