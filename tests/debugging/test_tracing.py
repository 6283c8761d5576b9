# SPDX-License-Identifier: Apache-2.0
import copy
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric.debugging import Checks, DebugChecks
from fabric.plugins.precision import Precision


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    monkeypatch.setenv("FABRIC_DEBUG", "1")
    fabric = Fabric(accelerator="cpu", devices=1)
    yield fabric
    fabric.teardown()


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Root(nn.Module):
    """Finite in forward; at 0 its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = inner
        self.last = nn.Linear(2, 1)
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += 0  # in place, on what a module returned
        return self.last(x + self.inner(x))


def step(fabric: Fabric, model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = Tensor.sum) -> None:
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(loss(model(x)))
    optimizer.step()


X = torch.tensor([[1.0, 0.0]])


def fails(text: str, function: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(FloatingPointError, match=f"^{re.escape(text)}$"):
        function(*args)


def test_the_first_module_in_forward(fabric: Fabric) -> None:
    text = (
        "`inner` (`Log`) is the first module in forward that returns Inf: what it was given has none.\n"
        "  input: float32 [1, 2], min 0, max 1, mean 0.5\n"
        "  output: float32 [1, 2], min 0, max 0, mean 0, 1 Inf"
    )
    fails(text, step, fabric, Block(Log()), X)


def test_a_module_whose_parameters_are_the_cause(fabric: Fabric) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight[0] = float("nan")
        model[0].weight.fill_(0.0)
        model[0].bias.fill_(1.0)
    text = (
        "`1` (`Linear`) is the first module in forward that returns NaN: what it was given has none.\n"
        "  input: float32 [1, 2], min 1, max 1, mean 1\n"
        f"  output: float32 [1, 2], {_range(model[1].weight[1].sum())}, 1 NaN\n"
        f"  parameter `weight`: float32 [2, 2], {_range(*model[1].weight[1])}, 2 NaN"
    )
    fails(text, step, fabric, model, X)


def _range(*values: Tensor) -> str:
    found = torch.stack(values).double()
    return f"min {found.min().item():.4g}, max {found.max().item():.4g}, mean {found.mean().item():.4g}"


def test_nan_in_the_data(fabric: Fabric) -> None:
    text = "`Block` was given NaN: it is in the data.\n  input: float32 [1, 2], min 1, max 1, mean 1, 1 NaN"
    fails(text, step, fabric, Block(nn.Identity()), torch.tensor([[1.0, float("nan")]]))


def test_the_first_module_in_backward(fabric: Fabric) -> None:
    text = (
        "`inner` (`Root`) is the first module in backward that makes Inf, in `SqrtBackward0`: the gradient that it was"
        " given has none.\n"
        "  gradient it was given: float32 [1, 2], min 1, max 1, mean 1\n"
        "  gradient it made: float32 [1, 2], min 0.5, max 0.5, mean 0.5, 1 Inf"
    )
    model = Block(Root())
    nn.init.ones_(model.last.weight)
    fails(text, step, fabric, model, X)


def test_what_the_loss_does_is_not_blamed_on_the_model(fabric: Fabric) -> None:
    text = (
        "The gradient of what `Linear` returned has Inf: it comes from the loss, or from what stands between the model"
        " and the loss.\n  gradient: float32 [1, 1], 1 Inf"
    )
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    fails(text, step, fabric, model, X, lambda y: y.sqrt().sum())


def test_a_gradient_that_is_spoilt_after_backward(fabric: Fabric) -> None:
    model = nn.Linear(1, 1)
    model_, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model_(torch.ones(1, 1)).sum())
    assert model.bias.grad is not None
    model.bias.grad /= 0
    text = (
        "The gradient of `bias` (in `Linear`) has Inf at `optimizer.step()`, and had none in backward.\n"
        "  gradient: float32 [1], 1 Inf"
    )
    fails(text, optimizer.step)


class Masked(nn.Module):
    """What a mask makes infinite on purpose goes in; a row that is masked altogether comes out as NaN."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return (x if mask is None else x + mask).softmax(-1)


def test_an_infinite_mask_is_no_error_but_what_it_ruins_is(fabric: Fabric) -> None:
    model = fabric.setup_module(Masked())
    inf = float("inf")
    assert model(X, mask=torch.tensor([0.0, -inf]))[0, 0] == 1
    with pytest.raises(FloatingPointError, match=r"^`Masked` is the first module in forward that returns NaN"):
        model(X, mask=torch.tensor([-inf, -inf]))


class Scaled(Precision):
    """As if a loss scaler were active."""

    @property
    def skips_nonfinite_steps(self) -> bool:
        return True


def test_under_a_loss_scaler_gradients_may_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_DEBUG", "1")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=Scaled())
    step(fabric, Block(Root()), X)
    with pytest.raises(FloatingPointError, match=r"^`inner` \(`Log`\) is the first module in forward"):
        step(fabric, Block(Log()), X)
    fabric.teardown()


def test_a_state_that_is_kept_between_calls(fabric: Fabric) -> None:
    """The graph of earlier calls is not walked again, and its operations keep their names."""
    model = fabric.setup_module(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    x = X
    for _ in range(3):
        x = model(x)
    assert fabric._checks._tracer._found == 9  # type: ignore[attr-defined]  # three operations in each call
    fabric.backward(x.sum())


def test_it_computes_the_same_and_leaves_nothing_behind(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(fabric: Fabric) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 1))
        wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            fabric.backward(wrapped(torch.randn(8, 2)).square().mean())
            optimizer.step()
        hooks.append(sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()))
        fabric.teardown()
        hooks.append(sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()))
        hooks.append(len(optimizer.optimizer._optimizer_step_pre_hooks))
        return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]

    hooks: list[int] = []
    found = train(fabric)
    monkeypatch.delenv("FABRIC_DEBUG")
    plain = Fabric(accelerator="cpu", devices=1)
    expected = train(plain)
    assert all(map(torch.equal, found, expected))
    assert hooks == [12, 0, 0, 0, 0, 0]
    assert (type(fabric._checks), type(plain._checks)) == (DebugChecks, Checks)


def test_modules_are_copied_and_pickled_as_ever(fabric: Fabric) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    wrapped = fabric.setup_module(model)
    twin = copy.deepcopy(wrapped)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        assert torch.equal(other(X), wrapped(X))
    assert torch.isnan(loaded(X * float("nan"))).all()


def test_a_compiled_module_is_left_alone(fabric: Fabric) -> None:
    net = nn.Linear(2, 1)
    text = (
        "Debug mode can't look into `Linear`, which is compiled: neither NaN nor its backward is traced. Leave"
        " `torch.compile` out while you look for an error."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        model, optimizer = fabric.setup(torch.compile(net, backend="eager"), torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(X).sum())
    optimizer.step()
    assert not net._forward_hooks


def test_other_kinds_of_values(fabric: Fabric) -> None:
    class Mixed(nn.Module):
        def forward(self, data: dict[str, Any]) -> Any:
            return {**data, "y": [data["x"].to(torch.bfloat16), data["x"].to(torch.complex64)], "n": 3}

    model = fabric.setup_module(Mixed())
    data = {"x": X, "ids": torch.arange(3), "sparse": torch.eye(2).to_sparse(), "none": None, "empty": torch.ones(0)}
    assert model(data)["n"] == 3
