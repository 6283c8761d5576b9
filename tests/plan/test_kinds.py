# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from fabric.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, Inventory, MPSAccelerator
from fabric.plugins.precision import Precision
from fabric.strategies import (
    STRATEGIES,
    DataParallelStrategy,
    DDPStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from tests.plan.cases import LAPTOP, LOOP, MAC, NOTEBOOK, SERVER, TORCHRUN, plan, refused

BOTH = Inventory(cuda_devices=1, mps_devices=1)


@pytest.mark.parametrize(
    ("accelerator", "inventory", "kind", "reason"),
    [
        ("auto", LAPTOP, CPUAccelerator, "auto: no GPU visible"),
        ("auto", SERVER, CUDAAccelerator, "auto: 4 CUDA devices visible"),
        ("auto", MAC, MPSAccelerator, "auto: 1 MPS device visible"),
        ("auto", BOTH, CUDAAccelerator, "auto: 1 CUDA device visible"),
        ("cpu", SERVER, CPUAccelerator, "argument"),
        ("cuda", SERVER, CUDAAccelerator, "argument"),
        ("mps", MAC, MPSAccelerator, "argument"),
        ("gpu", SERVER, CUDAAccelerator, "argument"),
        ("gpu", MAC, MPSAccelerator, "argument"),
        (CPUAccelerator(), SERVER, CPUAccelerator, "argument"),
    ],
)
def test_accelerator(accelerator: Any, inventory: Inventory, kind: type[Accelerator], reason: str) -> None:
    choice = plan({}, inventory, accelerator=accelerator).accelerator
    assert type(choice.value) is kind
    assert (str(choice), choice.reason) == (kind.name, reason)


def test_an_accelerator_of_the_users_own_is_used_as_it_is() -> None:
    accelerator = CPUAccelerator()
    assert plan(accelerator=accelerator).accelerator.value is accelerator


REMEDY = 'Write `accelerator="cpu"`, or `accelerator="auto"` to take what is there.'


@pytest.mark.parametrize(
    ("accelerator", "environ", "error", "message"),
    [
        (
            "cdua",
            {},
            ValueError,
            "`accelerator='cdua'` is not a known accelerator."
            " Did you mean 'cuda'? Choose one of 'auto', 'cpu', 'cuda', 'gpu', 'mps'.",
        ),
        (
            "auto",
            {"FABRIC_ACCELERATOR": "CPU"},
            ValueError,
            "`FABRIC_ACCELERATOR=CPU` is not a known accelerator."
            " Did you mean 'cpu'? Choose one of 'auto', 'cpu', 'cuda', 'gpu', 'mps'.",
        ),
        (
            "toaster",
            {},
            ValueError,
            "`accelerator='toaster'` is not a known accelerator. Choose one of 'auto', 'cpu', 'cuda', 'gpu', 'mps'.",
        ),
        (
            3,
            {},
            TypeError,
            "`accelerator=3` is of type `int`. Write a name such as 'cpu', 'gpu' or 'cuda', or pass an `Accelerator`"
            " instance.",
        ),
        (
            "cuda",
            {},
            ValueError,
            f"`accelerator='cuda'` is not available: this process sees no CUDA device. {REMEDY}",
        ),
        (
            "cuda",
            {"CUDA_VISIBLE_DEVICES": "-1"},
            ValueError,
            "`accelerator='cuda'` is not available: this process sees no CUDA device (`CUDA_VISIBLE_DEVICES=-1`)."
            f" {REMEDY}",
        ),
        (
            CUDAAccelerator(),
            {"CUDA_VISIBLE_DEVICES": ""},
            ValueError,
            "`accelerator=CUDAAccelerator(...)` is not available: this process sees no CUDA device"
            f" (`CUDA_VISIBLE_DEVICES=`). {REMEDY}",
        ),
        ("mps", {}, ValueError, f"`accelerator='mps'` is not available: this process sees no MPS device. {REMEDY}"),
        (
            "gpu",
            {},
            ValueError,
            f"`accelerator='gpu'` is not available: this process sees no CUDA or MPS device. {REMEDY}",
        ),
    ],
)
def test_accelerator_refused(accelerator: Any, environ: dict[str, str], error: type[Exception], message: str) -> None:
    refused(error, message, environ, accelerator=accelerator)


@pytest.mark.parametrize(
    ("environ", "inventory", "devices", "label", "reason"),
    [
        ({}, LAPTOP, "auto", "single_device", "auto: one process"),
        ({}, LAPTOP, 2, "ddp", "auto: 2 processes"),
        ({}, SERVER, "auto", "ddp", "auto: 4 processes"),
        ({}, SERVER, [2], "single_device", "auto: one process"),
        ({}, NOTEBOOK, "auto", "single_device", "auto: one process"),
        ({}, NOTEBOOK, 2, "ddp_fork", "auto: 2 processes, from a notebook"),
        (TORCHRUN, LAPTOP, "auto", "ddp", "auto: 4 processes"),
        (TORCHRUN, NOTEBOOK, "auto", "ddp", "auto: 4 processes"),
        (LOOP, LAPTOP, "auto", "ddp", "auto: 4 processes"),
    ],
)
def test_auto_strategy(environ: dict[str, str], inventory: Inventory, devices: Any, label: str, reason: str) -> None:
    choice = plan(environ, inventory, devices=devices).strategy
    assert (str(choice), choice.reason) == (label, reason)
    assert type(choice.value) is type(STRATEGIES[label]())
    assert choice.value.start_method == STRATEGIES[label]().start_method


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_strategy_by_name(name: str) -> None:
    choice = plan({}, SERVER, strategy=name).strategy
    assert type(choice.value) is type(STRATEGIES[name]())
    assert (str(choice), choice.reason) == (name, "argument")


def test_strategy_by_instance() -> None:
    strategy = DDPStrategy()
    choice = plan(strategy=strategy).strategy
    assert choice.value is strategy
    assert (str(choice), choice.reason) == ("DDPStrategy", "argument")


def test_strategy_refused() -> None:
    choices = ", ".join(map(repr, sorted(["auto", *STRATEGIES])))
    message = f"`strategy='ddpp'` is not a known strategy. Did you mean 'ddp'? Choose one of {choices}."
    refused(ValueError, message, strategy="ddpp")
    message = f"`FABRIC_STRATEGY=DDP` is not a known strategy. Did you mean 'ddp'? Choose one of {choices}."
    refused(ValueError, message, {"FABRIC_STRATEGY": "DDP"})
    message = f"`strategy='zzzz'` is not a known strategy. Choose one of {choices}."
    refused(ValueError, message, strategy="zzzz")
    message = "`strategy=DDPStrategy` is a class. Pass an instance: `strategy=DDPStrategy(...)`."
    refused(TypeError, message, strategy=DDPStrategy)
    message = "`strategy=3` is of type `int`. Write a name such as 'ddp', or pass a `Strategy` instance."
    refused(TypeError, message, strategy=3)


@pytest.mark.parametrize(("strategy", "label"), [("dp", "dp"), (DataParallelStrategy(), "DataParallelStrategy")])
def test_strategy_on_another_accelerator(strategy: str | Strategy, label: str) -> None:
    message = (
        f"`strategy={label}` (argument) runs on cuda, but the accelerator is `cpu` (auto: no GPU visible)."
        " Choose another strategy, such as `ddp`, or another accelerator."
    )
    refused(ValueError, message, strategy=strategy)


@pytest.mark.parametrize(
    ("precision", "label", "reason"),
    [
        (None, "32-true", "default"),
        ("auto", "32-true", "default"),
        ("32", "32-true", "argument"),
        (16, "16-mixed", "argument"),
        ("bf16-true", "bf16-true", "argument"),
    ],
)
def test_precision(precision: Any, label: str, reason: str) -> None:
    choice = plan(precision=precision).precision
    assert (choice.value.precision, str(choice), choice.reason) == (label, label, reason)


class _Picky(SingleDeviceStrategy):
    """Makes its own precision, and says which device type it was asked for."""

    def create_precision(self, name: str, device_type: str) -> Precision:
        if name == "64-true":
            raise ValueError(f"`_Picky` does not support `{name}` on {device_type}.")
        return super().create_precision(name, device_type)


def test_the_strategy_makes_the_precision() -> None:
    refused(ValueError, "`_Picky` does not support `64-true` on cuda.", {}, SERVER, strategy=_Picky(), precision=64)
    refused(ValueError, "`_Picky` does not support `64-true` on cpu.", strategy=_Picky(), precision=64)


def test_precision_refused() -> None:
    with pytest.raises(ValueError, match=r"^`precision='fp16'` is not a known precision\. Did you mean '16-mixed'\? "):
        plan(precision="fp16")
    message = (
        "`precision=Precision(...)` is of type `Precision`. Write a name such as 'bf16-mixed', or pass a `Precision`"
        " instance in `plugins=`."
    )
    refused(TypeError, message, precision=Precision())
    message = (
        "`precision=16.0` is of type `float`. Write a name such as 'bf16-mixed', or pass a `Precision` instance in"
        " `plugins=`."
    )
    refused(TypeError, message, precision=16.0)
