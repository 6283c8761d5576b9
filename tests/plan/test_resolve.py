# SPDX-License-Identifier: Apache-2.0
import os
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabric.accelerators import Inventory, take_inventory
from fabric.plan import Arguments, Choice, resolve
from fabric.plugins.environments import (
    ClusterEnvironment,
    LaunchedEnvironment,
    LocalEnvironment,
    PlainEnvironment,
    TorchElasticEnvironment,
)
from tests.plan.cases import CHILD, LAPTOP, LOOP, NODE, SERVER, TORCHRUN, launched, plan, refused


@pytest.mark.parametrize(
    ("environ", "inventory", "kind", "label", "reason"),
    [
        ({}, LAPTOP, LocalEnvironment, "local", "auto: no cluster detected"),
        (TORCHRUN, LAPTOP, TorchElasticEnvironment, "torchelastic", "auto: TORCHELASTIC_RUN_ID (torchrun)"),
        (LOOP, LAPTOP, PlainEnvironment, "plain", "auto: MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE"),
        (NODE, LAPTOP, PlainEnvironment, "plain", "auto: MASTER_ADDR, MASTER_PORT, NODE_RANK, WORLD_SIZE"),
        (launched(), CHILD, LaunchedEnvironment, "launched", "started by rank 0 (pid 9)"),
        # A rank of ours in a cluster is ours; a user's own subprocess is no rank of ours.
        ({**launched(), **NODE}, CHILD, LaunchedEnvironment, "launched", "started by rank 0 (pid 9)"),
        (launched(), LAPTOP, LocalEnvironment, "local", "auto: no cluster detected"),
    ],
)
def test_environment(
    environ: dict[str, str], inventory: Inventory, kind: type[ClusterEnvironment], label: str, reason: str
) -> None:
    choice = plan(environ, inventory).environment
    assert type(choice.value) is kind
    assert (str(choice), choice.reason) == (label, reason)


def test_a_rank_of_ours_keeps_the_users_local_environment_out() -> None:
    choice = plan(launched(), CHILD, plugins=LocalEnvironment(2)).environment
    assert isinstance(choice.value, LaunchedEnvironment)
    message = (
        "`Fabric(plugins=TorchElasticEnvironment(...))` says that every process is started from outside, but this one"
        " was started by rank 0 (pid 9). Leave the plugin out, or start the script without Fabric."
    )
    refused(ValueError, message, launched(), CHILD, plugins=TorchElasticEnvironment(TORCHRUN))


def test_explain() -> None:
    made = plan({**NODE, "WORLD_SIZE": "8", "FABRIC_PRECISION": "bf16"}, SERVER, strategy="ddp")
    assert made.explain().splitlines() == [
        "accelerator    cuda        auto: 4 CUDA devices visible",
        "devices        4           auto: 4 CUDA devices visible",
        "num_nodes      2           WORLD_SIZE=8 over 4 local devices (plain cluster)",
        "strategy       ddp         argument",
        "precision      bf16-mixed  FABRIC_PRECISION=bf16 (fabric run)",
        "launcher       subprocess  starts ranks 5-7 of this node; rank 4 is this process",
        "environment    plain       auto: MASTER_ADDR, MASTER_PORT, NODE_RANK, WORLD_SIZE",
        "threads        4           auto: 16 cores for 4 local ranks",
        "checkpoint_io  default     the strategy's own",
    ]


def test_summary() -> None:
    assert plan({}, SERVER, devices=[1, 3]).summary() == (
        "accelerator=cuda, devices=2 (1,3), num_nodes=1, strategy=ddp, precision=32-true, launcher=subprocess,"
        " world_size=2"
    )


def test_frozen() -> None:
    made = plan()
    with pytest.raises(FrozenInstanceError):
        made.devices = Choice((0,), "no")
    with pytest.raises(FrozenInstanceError):
        made.devices.reason = "no"


@pytest.mark.parametrize("cluster", [{}, TORCHRUN, LOOP, NODE, launched()])
def test_pure(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan follows from its inputs: this process's own variables do not count, and nothing is written."""
    expected = plan(cluster, CHILD)
    contrary = {"FABRIC_DEVICES": "7", "FABRIC_STRATEGY": "nonsense", "OMP_NUM_THREADS": "9", **TORCHRUN}
    for name, value in contrary.items():
        monkeypatch.setenv(name, value)
    before, given = dict(os.environ), dict(cluster)
    arguments = Arguments()
    again = resolve(arguments, given, CHILD)
    assert again.explain() == expected.explain()
    assert given == cluster
    assert dict(os.environ) == before
    assert arguments == Arguments()


@pytest.mark.parametrize("arguments", [{}, {"devices": 2}, {"accelerator": "cpu"}, {"precision": "16-mixed"}])
def test_nothing_is_initialised(arguments: dict[str, Any]) -> None:
    resolve(Arguments(**arguments), {}, take_inventory({}))
    plan({}, SERVER, **arguments)
    assert not torch.cuda.is_initialized()
    assert not dist.is_initialized()


def test_two_plans_share_nothing() -> None:
    one, other = plan(devices=2), plan(devices=2)
    assert one.strategy.value is not other.strategy.value
    assert one.environment.value is not other.environment.value
    assert one.precision.value is not other.precision.value
