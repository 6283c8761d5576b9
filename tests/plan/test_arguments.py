# SPDX-License-Identifier: Apache-2.0
import inspect
from typing import Any

import pytest

from fabric.accelerators import CPUAccelerator, Inventory
from fabric.fabric import Fabric
from fabric.plan import Arguments
from fabric.plan.arguments import describe
from fabric.plugins.precision import HalfPrecision
from fabric.strategies import DDPStrategy, SingleDeviceStrategy
from tests.plan.cases import LAPTOP, SERVER, plan, refused


def test_arguments_mirror_the_constructor() -> None:
    constructor = {name: parameter.default for name, parameter in inspect.signature(Fabric).parameters.items()}
    mirror = {name: parameter.default for name, parameter in inspect.signature(Arguments).parameters.items()}
    assert mirror == {name: constructor[name] for name in constructor if name not in ("callbacks", "loggers")}


@pytest.mark.parametrize(
    ("field", "variable", "value", "label"),
    [
        ("accelerator", "FABRIC_ACCELERATOR", "cuda", "cuda"),
        ("devices", "FABRIC_DEVICES", "2", "2"),
        ("devices", "FABRIC_DEVICES", "1,3", "2 (1,3)"),
        ("devices", "FABRIC_DEVICES", "-1", "4"),
        ("num_nodes", "FABRIC_NUM_NODES", "1", "1"),
        ("strategy", "FABRIC_STRATEGY", "ddp_spawn", "ddp_spawn"),
        ("precision", "FABRIC_PRECISION", "bf16", "bf16-mixed"),
    ],
)
def test_an_option_of_fabric_run(field: str, variable: str, value: str, label: str) -> None:
    choice = getattr(plan({variable: value}, SERVER), field)
    assert (str(choice), choice.reason) == (label, f"{variable}={value} (fabric run)")


@pytest.mark.parametrize("value", ["auto", "", " "])
@pytest.mark.parametrize("name", ["ACCELERATOR", "DEVICES", "NUM_NODES", "STRATEGY", "PRECISION"])
def test_an_option_that_says_nothing(name: str, value: str) -> None:
    assert plan({f"FABRIC_{name}": value}, SERVER).explain() == plan({}, SERVER).explain()


@pytest.mark.parametrize("nothing", ["auto", None])
@pytest.mark.parametrize("name", ["accelerator", "devices", "num_nodes", "strategy", "precision"])
def test_an_argument_that_says_nothing(name: str, nothing: str | None) -> None:
    assert plan({}, SERVER, **{name: nothing}).explain() == plan({}, SERVER).explain()


@pytest.mark.parametrize(
    ("argument", "environ", "inventory"),
    [
        ({"accelerator": "gpu"}, {"FABRIC_ACCELERATOR": "cuda"}, SERVER),
        ({"accelerator": CPUAccelerator()}, {"FABRIC_ACCELERATOR": "cpu"}, SERVER),
        ({"devices": 2}, {"FABRIC_DEVICES": "2"}, LAPTOP),
        ({"devices": 2}, {"FABRIC_DEVICES": "0,1"}, SERVER),
        ({"devices": -1}, {"FABRIC_DEVICES": "4"}, SERVER),
        ({"devices": [1]}, {"FABRIC_DEVICES": "1,"}, SERVER),
        ({"num_nodes": 1}, {"FABRIC_NUM_NODES": "1"}, LAPTOP),
        ({"num_nodes": "1"}, {"FABRIC_NUM_NODES": "1"}, LAPTOP),
        ({"strategy": "ddp"}, {"FABRIC_STRATEGY": "ddp"}, LAPTOP),
        ({"strategy": DDPStrategy(static_graph=True)}, {"FABRIC_STRATEGY": "ddp"}, LAPTOP),
        ({"precision": "bf16"}, {"FABRIC_PRECISION": "bf16-mixed"}, LAPTOP),
        ({"precision": 64}, {"FABRIC_PRECISION": "64-true"}, LAPTOP),
    ],
)
def test_both_say_the_same(argument: dict[str, Any], environ: dict[str, str], inventory: Inventory) -> None:
    (name,) = argument
    assert getattr(plan(environ, inventory, **argument), name).reason == "argument"


@pytest.mark.parametrize(
    ("argument", "environ", "first", "second"),
    [
        ({"accelerator": "cuda"}, {"FABRIC_ACCELERATOR": "cpu"}, "accelerator='cuda'", "--accelerator"),
        ({"accelerator": CPUAccelerator()}, {"FABRIC_ACCELERATOR": "gpu"}, "accelerator=CPUAccelerator(...)", None),
        ({"devices": 2}, {"FABRIC_DEVICES": "4"}, "devices=2", "--devices"),
        ({"devices": "0,1"}, {"FABRIC_DEVICES": "1,0"}, "devices='0,1'", "--devices"),
        ({"num_nodes": 1}, {"FABRIC_NUM_NODES": "2"}, "num_nodes=1", "--num-nodes"),
        ({"strategy": "ddp"}, {"FABRIC_STRATEGY": "ddp_spawn"}, "strategy='ddp'", "--strategy"),
        ({"strategy": DDPStrategy()}, {"FABRIC_STRATEGY": "ddp_spawn"}, "strategy=DDPStrategy(...)", "--strategy"),
        (
            {"strategy": DDPStrategy(start_method="spawn")},
            {"FABRIC_STRATEGY": "ddp"},
            "strategy=DDPStrategy(...)",
            None,
        ),
        ({"precision": "bf16"}, {"FABRIC_PRECISION": "16"}, "precision='bf16'", "--precision"),
    ],
)
def test_they_contradict(argument: dict[str, Any], environ: dict[str, str], first: str, second: str | None) -> None:
    (name,), ((variable, value),) = argument, environ.items()
    option = second or f"--{name}"
    message = (
        f"`Fabric({first})` contradicts `{variable}={value}` (fabric run {option})."
        " Leave one of them out, or make them equal."
    )
    refused(ValueError, message, environ, SERVER, **argument)


@pytest.mark.parametrize(
    ("num_nodes", "error", "message"),
    [
        (0, ValueError, "`num_nodes=0` is too small. Write a number of machines of at least 1."),
        (-1, ValueError, "`num_nodes=-1` is too small. Write a number of machines of at least 1."),
        ("-1", ValueError, "`num_nodes='-1'` is too small. Write a number of machines of at least 1."),
        ("two", ValueError, "`num_nodes='two'` is not a number. Write a number of machines of at least 1."),
        (True, TypeError, "`num_nodes=True` is of type `bool`. Write a number of machines of at least 1."),
        (2.0, TypeError, "`num_nodes=2.0` is of type `float`. Write a number of machines of at least 1."),
    ],
)
def test_no_number_of_machines(num_nodes: Any, error: type[Exception], message: str) -> None:
    refused(error, message, num_nodes=num_nodes)


def test_a_wrong_option_is_named_as_the_user_wrote_it() -> None:
    usage = 'Write a number of devices, a list of indices such as `[0, 2]`, "auto", or -1 for all of them.'
    message = f"`FABRIC_DEVICES=two` is neither a number nor a list of indices. {usage}"
    refused(ValueError, message, {"FABRIC_DEVICES": "two"})
    message = "`FABRIC_NUM_NODES=0` is too small. Write a number of machines of at least 1."
    refused(ValueError, message, {"FABRIC_NUM_NODES": "0"})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ddp", "'ddp'"),
        (2, "2"),
        ([0, 1], "[0, 1]"),
        (None, "None"),
        (SingleDeviceStrategy(), "SingleDeviceStrategy(...)"),
        (HalfPrecision, "HalfPrecision"),
    ],
)
def test_describe(value: object, text: str) -> None:
    assert describe(value) == text
