# SPDX-License-Identifier: Apache-2.0
"""`FSDPPrecision` without ranks; under them it is tested with the strategies."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fabric import Fabric
from fabric.plugins.precision import FSDPPrecision
from fabric.plugins.precision.fsdp import _AgreeingGradScaler


@pytest.mark.parametrize(("name", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_what_fully_shard_is_told(name, dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    assert FSDPPrecision(name, "cpu").mixed_precision_policy == policy


def test_the_strategy_makes_it():
    for strategy in ("fsdp", "hsdp", "fsdp_cpu_offload"):
        assert type(Fabric(accelerator="cpu", strategy=strategy, precision="16-mixed").precision) is FSDPPrecision
        assert type(Fabric(accelerator="cpu", strategy=strategy, precision="bf16-mixed").precision) is FSDPPrecision


def test_scalers():
    given = torch.amp.GradScaler("cpu")
    assert FSDPPrecision("16-mixed", "cpu", scaler=given).scaler is given
    assert FSDPPrecision("bf16-mixed", "cpu").scaler is None
    assert isinstance(FSDPPrecision("16-mixed", "cpu").scaler, _AgreeingGradScaler)


def test_what_the_scaler_overrides_exists():
    """It is private to PyTorch, which overrides it itself."""
    assert "_unscale_grads_" in vars(ShardedGradScaler)
    assert "_unscale_grads_" in vars(torch.amp.GradScaler)


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_in_one_process_it_is_a_plain_scaler(value):
    found, gradients = [], []
    for kind in (_AgreeingGradScaler, torch.amp.GradScaler):
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.tensor([value, 2.0])
        optimizer = SimpleNamespace(param_groups=[{"params": [parameter, torch.nn.Parameter(torch.ones(1))]}])
        scales = torch.tensor(0.5), torch.tensor(0.0)
        found.append(kind("cpu")._unscale_grads_(optimizer, *scales, False))
        gradients.append(parameter.grad)
    assert found[0] == found[1]
    assert torch.equal(gradients[0].nan_to_num(7), gradients[1].nan_to_num(7))
