# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from fabric.plan.plugins import Plugins, sort_plugins
from fabric.plugins.environments import LocalEnvironment
from fabric.plugins.io import TorchCheckpointIO
from fabric.plugins.precision import HalfPrecision, MixedPrecision
from tests.plan.cases import SERVER, TORCHRUN, plan, refused

ENVIRONMENT, PRECISION, IO = LocalEnvironment(2), HalfPrecision("bf16-true"), TorchCheckpointIO()


@pytest.mark.parametrize(
    ("plugins", "sorted_plugins"),
    [
        (None, Plugins()),
        ([], Plugins()),
        (PRECISION, Plugins(precision=PRECISION)),
        ((IO,), Plugins(checkpoint_io=IO)),
        ([IO, ENVIRONMENT, PRECISION], Plugins(environment=ENVIRONMENT, precision=PRECISION, checkpoint_io=IO)),
    ],
)
def test_sorted_by_type(plugins: Any, sorted_plugins: Plugins) -> None:
    assert sort_plugins(plugins) == sorted_plugins


def test_used_as_they_are() -> None:
    made = plan(plugins=[IO, ENVIRONMENT, PRECISION])
    assert made.precision.value is PRECISION
    assert made.checkpoint_io.value is IO
    assert (str(made.precision), made.precision.reason) == ("bf16-true", "argument (plugins)")
    assert (str(made.checkpoint_io), made.checkpoint_io.reason) == ("TorchCheckpointIO", "argument (plugins)")
    assert (str(made.environment), made.environment.reason) == ("local", "argument (plugins)")
    assert (str(made.devices), made.devices.reason) == ("2", "LocalEnvironment(2)")


def test_an_environment_switches_detection_off() -> None:
    made = plan(TORCHRUN, plugins=LocalEnvironment())
    assert (made.world_size, str(made.launcher)) == (1, "none")


@pytest.mark.parametrize(
    ("plugins", "error", "message"),
    [
        (
            [3],
            TypeError,
            "`Fabric(plugins=...)` contains `3` of type `int`. Pass instances of `ClusterEnvironment`, `Precision`,"
            " `CheckpointIO`; names of strategies and precisions go into `strategy=` and `precision=`.",
        ),
        (
            "ddp",
            TypeError,
            "`Fabric(plugins=...)` contains `'ddp'` of type `str`. Pass instances of `ClusterEnvironment`, `Precision`,"
            " `CheckpointIO`; names of strategies and precisions go into `strategy=` and `precision=`.",
        ),
        (
            LocalEnvironment,
            TypeError,
            "`Fabric(plugins=...)` contains the class `LocalEnvironment`. Pass an instance: `LocalEnvironment(...)`.",
        ),
        (
            [PRECISION, MixedPrecision("bf16-mixed", "cpu")],
            ValueError,
            "`Fabric(plugins=...)` contains two plugins of type `Precision`: HalfPrecision(...) and"
            " MixedPrecision(...). Pass one of them.",
        ),
        (
            [IO, IO],
            ValueError,
            "`Fabric(plugins=...)` contains two plugins of type `CheckpointIO`: TorchCheckpointIO(...) and"
            " TorchCheckpointIO(...). Pass one of them.",
        ),
    ],
)
def test_refused(plugins: Any, error: type[Exception], message: str) -> None:
    refused(error, message, plugins=plugins)


def test_a_precision_is_given_once() -> None:
    message = (
        "`Fabric(plugins=HalfPrecision(...))` and `precision='bf16-true'` both choose a precision."
        " Leave one of them out."
    )
    refused(ValueError, message, plugins=PRECISION, precision="bf16-true")
    message = (
        "`Fabric(plugins=HalfPrecision(...))` and `FABRIC_PRECISION=16` both choose a precision. Leave one of them out."
    )
    refused(ValueError, message, {"FABRIC_PRECISION": "16"}, SERVER, plugins=PRECISION)
    assert plan({"FABRIC_PRECISION": "bf16-true"}, plugins=PRECISION).precision.value is PRECISION
