# SPDX-License-Identifier: Apache-2.0
import re
from dataclasses import dataclass

import pytest
import torch

from fabric.plugins.precision import (
    PRECISIONS,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    canonical_precision,
    create_precision,
)


def test_only_precisions_that_override_a_forward_hook_change_forward():
    class Scaled(Precision):
        def backward(self, tensor, model, *args, **kwargs):
            super().backward(tensor * 2, model, *args, **kwargs)

    class Padded(Precision):
        def convert_input(self, data):
            return data

    assert not Precision().changes_forward
    assert not Scaled().changes_forward
    assert Padded().changes_forward
    assert [name for name in PRECISIONS if not create_precision(name, "cpu").changes_forward] == ["32-true"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("16", "16-mixed"),
        (16, "16-mixed"),
        ("bf16", "bf16-mixed"),
        (32, "32-true"),
        (64, "64-true"),
        ("bf16-true",) * 2,
    ],
)
def test_aliases(given, expected):
    assert canonical_precision(given) == expected


@pytest.mark.parametrize(
    ("given", "near"),
    [("fp16", "16-mixed"), ("bfloat16", "bf16-mixed"), ("float64", "64-true"), ("16-mixd", "16-mixed")],
)
def test_an_unknown_name_lists_the_choices_and_the_nearest(given, near):
    text = (
        f"`precision='{given}'` is not a known precision. Did you mean '{near}'? Choose one of '32-true', '64-true',"
        " '16-true', 'bf16-true', '16-mixed', 'bf16-mixed', '32', '64', '16', 'bf16'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        canonical_precision(given)


@pytest.mark.parametrize("name", list(PRECISIONS))
def test_each_precision_carries_its_own_name(name):
    assert create_precision(name, "cpu").precision == name


@pytest.mark.parametrize(
    ("precision", "dtype", "output"),
    [
        (HalfPrecision("16-true"), torch.float16, torch.float32),
        (HalfPrecision("bf16-true"), torch.bfloat16, torch.float32),
        (DoublePrecision(), torch.float64, torch.float64),
    ],
)
def test_true_precisions_convert_module_input_and_output(precision, dtype, output):
    module = precision.convert_module(torch.nn.Linear(2, 2))
    assert {p.dtype for p in module.parameters()} == {dtype}
    data = precision.convert_input({"x": torch.ones(1), "ids": torch.ones(1, dtype=torch.int64), "text": "a"})
    assert data["x"].dtype is dtype
    assert data["ids"].dtype is torch.int64
    assert precision.convert_output(torch.ones(1, dtype=dtype)).dtype is output
    for context in (precision.forward_context, precision.module_init_context, precision.tensor_init_context):
        with context():
            assert torch.zeros(1).dtype is dtype
        assert torch.zeros(1).dtype is torch.float32


def test_the_default_dtype_comes_back_after_an_error():
    def fail():
        with HalfPrecision("bf16-true").forward_context():
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(("name", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_mixed_runs_forward_in_half_and_returns_float32(name, dtype):
    precision = MixedPrecision(name, "cpu")
    module = precision.convert_module(torch.nn.Linear(2, 2))
    assert module.weight.dtype is torch.float32
    with precision.forward_context():
        output = module(torch.ones(1, 2))
    assert output.dtype is dtype
    wide = torch.ones(1, dtype=torch.float64)
    converted = precision.convert_output((output, wide))
    assert converted[0].dtype is torch.float32
    assert converted[1] is wide


def test_16_mixed_has_a_cpu_scaler_and_bf16_mixed_has_none():
    assert isinstance(MixedPrecision("16-mixed", "cpu").scaler, torch.amp.GradScaler)
    assert MixedPrecision("16-mixed", "cpu").skips_nonfinite_steps
    assert MixedPrecision("bf16-mixed", "cpu").scaler is None
    assert not MixedPrecision("bf16-mixed", "cpu").skips_nonfinite_steps
    text = (
        "`MixedPrecision('bf16-mixed', scaler=...)` takes no loss scaler: bfloat16 has the range of float32."
        " Leave `scaler` out, or use '16-mixed'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        MixedPrecision("bf16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def _parameter(value):
    parameter = torch.nn.Parameter(torch.tensor([value]))
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def test_one_scaler_serves_two_optimizers_that_both_step_after_both_backwards():
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    (a, step_a), (b, step_b) = _parameter(1.0), _parameter(1.0)
    for expected_scale in (8.0, 16.0):
        for parameter, optimizer in ((a, step_a), (b, step_b)):
            optimizer.zero_grad()
            precision.backward((parameter * 0.25).sum(), None)
        for parameter, optimizer in ((a, step_a), (b, step_b)):
            before = parameter.item()
            precision.optimizer_step(optimizer)
            assert parameter.item() == before - 0.25  # never a half step, although the scale grows
        assert precision.scaler.get_scale() == expected_scale
    assert precision.state_dict()["scale"] == 32.0  # the update that was put off


def test_an_overflow_skips_the_step_and_lowers_the_scale_once():
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    parameter, optimizer = _parameter(1.0)
    precision.backward((parameter * float("inf")).sum(), None)
    precision.optimizer_step(optimizer)
    assert parameter.item() == 1.0
    assert precision.state_dict()["scale"] == 4.0
    assert precision.state_dict()["scale"] == 4.0


def test_gradients_are_unscaled_once_however_often_they_are_clipped():
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    parameter, optimizer = _parameter(1.0)
    for _ in range(2):
        optimizer.zero_grad()
        precision.backward((parameter * 0.5).sum(), None)
        precision.unscale_gradients(optimizer)
        precision.unscale_gradients(optimizer)
        assert parameter.grad.item() == 0.5
        precision.optimizer_step(optimizer)


def test_the_state_of_the_scaler_is_restored():
    old = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    new = MixedPrecision("16-mixed", "cpu")
    new.load_state_dict(old.state_dict())
    assert new.state_dict() == old.state_dict()
    assert MixedPrecision("bf16-mixed", "cpu").state_dict() == {}


def test_a_closure_under_a_scaler_raises():
    _, optimizer = _parameter(1.0)
    text = (
        "`SGD.step(closure=...)` can't be combined with the loss scaler of `precision='16-mixed'`: a closure runs"
        " backward after the gradients were unscaled. Call `fabric.backward(loss)` yourself and step without a closure,"
        " or use 'bf16-mixed'."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        MixedPrecision("16-mixed", "cpu").optimizer_step(optimizer, closure=lambda: 0.0)


def test_mps_has_no_float64():
    text = "`precision='64-true'` can't run on MPS, which has no float64."
    text += " Choose '32-true', or `Fabric(accelerator='cpu')`."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        create_precision("64-true", "mps")


def test_loading_in_the_middle_of_a_run_starts_a_new_round():
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    saved = precision.state_dict()
    parameter, optimizer = _parameter(1.0)
    for finish in (precision.unscale_gradients, precision.optimizer_step):
        optimizer.zero_grad()
        precision.backward((parameter * 0.5).sum(), None)
        finish(optimizer)
        precision.load_state_dict(saved)  # back to an earlier checkpoint
    optimizer.zero_grad()
    precision.backward((parameter * 0.5).sum(), None)
    precision.unscale_gradients(optimizer)
    precision.optimizer_step(optimizer)
    assert parameter.item() == 0.0


def test_frozen_dataclasses_are_cast_too():
    @dataclass(frozen=True)
    class Output:
        logits: torch.Tensor
        name: str

    output = MixedPrecision("bf16-mixed", "cpu").convert_output(Output(torch.ones(1, dtype=torch.bfloat16), "a"))
    assert (output.logits.dtype, output.name) == (torch.float32, "a")
