# SPDX-License-Identifier: Apache-2.0
"""The stages of a model: cut at named modules, or given by the user."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Sequential
from typing_extensions import override

from fabric.strategies.pipelining.cut import Cut, Inputs, Surroundings, build, cut_model
from fabric.utilities.spelling import suggest

StageFactory = Callable[[Module, int, int], Module]
Stages = StageFactory | Sequence[Sequence[str]]


class Stage(ABC):
    """A part of a model that one rank runs.

    Args:
        names: The modules in it, for `fabric.explain()`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Its parameters and buffers, as they are right now."""

    @abstractmethod
    def prepare(self, device: torch.device) -> None:
        """Runs once, on the rank that has this stage, when the model's own tensors are on their device."""

    @abstractmethod
    def run(self, received: tuple[Tensor, ...], args: Any, kwargs: Any) -> Any:
        """What this stage makes of one micro-batch.

        Args:
            received: What the stage before sent; empty for the first one.
            args: The model's own inputs, on every rank.
            kwargs: The same, by name.
        """


class CutStage(Stage):
    """A stage that `split_at` has cut out."""

    def __init__(self, module: Module, cut: Cut) -> None:
        super().__init__([*cut.calls, *cut.reads])
        self._module = module
        self._cut = cut
        self._inputs = Inputs(module)
        self._run: dict[bool, Callable[..., Any]] = {}

    @property
    @override
    def tensors(self) -> list[Tensor]:
        called = [self._module.get_submodule(name) for name in self._cut.calls]
        read = [_find(self._module, name) for name in self._cut.reads]
        return [tensor for module in called for tensor in (*module.parameters(), *module.buffers())] + read

    @override
    def prepare(self, device: torch.device) -> None:
        surroundings = Surroundings(self._module, self._inputs.names)
        self._run = {training: build(graph, surroundings) for training, graph in self._cut.graphs.items()}

    @override
    def run(self, received: tuple[Tensor, ...], args: Any, kwargs: Any) -> Any:
        return self._run[self._module.training](*received, self._inputs.bind(args, kwargs))


class GivenStage(Stage):
    """A stage that the user has given: the first is called as the model is, the others with what they received."""

    def __init__(self, names: Sequence[str], module: Module, model: Module, *, first: bool) -> None:
        super().__init__(names)
        self._module = module
        self._model = model
        self._first = first
        models = set(model.modules())
        self._around = [each for each in module.modules() if each not in models]

    @property
    @override
    def tensors(self) -> list[Tensor]:
        return [*self._module.parameters(), *self._module.buffers()]

    @override
    def prepare(self, device: torch.device) -> None:
        self._module.to(device)  # it may have buffers of its own

    @override
    def run(self, received: tuple[Tensor, ...], args: Any, kwargs: Any) -> Any:
        for module in self._around:  # `model.eval()` reaches the model's own submodules only
            module.training = self._model.training
        return self._module(*args, **kwargs) if self._first else self._module(*received)


def create_stages(
    module: Module, split_at: Sequence[str] | None, stages: Stages | None, num_stages: int
) -> list[Stage]:
    """All stages of a model, in order; the same on every rank.

    Args:
        module: The user's model, whole.
        split_at: Names of the modules that begin a stage; None if the user gives `stages`.
        stages: For each stage the names of modules to call one after another, or a function.
        num_stages: How many there are.

    Raises:
        ValueError: If the model can't be divided like that.
        TypeError: If the function returns no module.
    """
    if split_at is not None:
        return [CutStage(module, cut) for cut in cut_model(module, split_at)]
    if callable(stages):
        return [_given(module, stages, index, num_stages) for index in range(num_stages)]
    return [_chain(module, names, index) for index, names in enumerate(stages or ())]


def _given(module: Module, factory: StageFactory, index: int, num_stages: int) -> Stage:
    stage = factory(module, index, num_stages)
    call = f"stages(module, {index}, {num_stages})"
    if not isinstance(stage, Module):
        raise TypeError(
            f"`PipelineParallelStrategy(stages=...)`: `{call}` returned a `{type(stage).__name__}`."
            " Return a `torch.nn.Module` made of the model's own submodules."
        )
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    strange = [name for name, parameter in stage.named_parameters() if id(parameter) not in own]
    if strange:
        raise ValueError(
            f"`PipelineParallelStrategy(stages=...)`: `{call}` returned a module whose parameter `{strange[0]}` is none"
            " of the model's. Build it of the model's own submodules, without copying them."
        )
    names = _largest(module, {id(parameter) for parameter in stage.parameters()})
    return GivenStage(names, stage, module, first=index == 0)


def _chain(module: Module, names: Sequence[str], index: int) -> Stage:
    known = [name for name, _ in module.named_modules() if name]
    for name in names:
        if name not in known:
            raise ValueError(
                f"`PipelineParallelStrategy(stages=...)` names `{name}` in stage {index}, which"
                f" `{type(module).__name__}` does not have. {suggest(name, known)}"
            )
    chain = Sequential(*(module.get_submodule(name) for name in names))
    return GivenStage(names, chain, module, first=index == 0)


def _largest(module: Module, parameters: set[int], prefix: str = "") -> list[str]:
    """The names of the largest submodules all of whose parameters are among these."""
    names = []
    for name, child in module.named_children():
        own = [id(parameter) for parameter in child.parameters()]
        if own and parameters.issuperset(own):
            names.append(f"{prefix}{name}")
        else:
            names += _largest(child, parameters, f"{prefix}{name}.")
    direct = module.named_parameters(recurse=False)
    return names + [f"{prefix}{name}" for name, parameter in direct if id(parameter) in parameters]


def _find(module: Module, name: str) -> Tensor:
    """A parameter or buffer by its name."""
    owner, _, last = name.rpartition(".")
    tensor = getattr(module.get_submodule(owner), last)
    return tensor if isinstance(tensor, Tensor) else Tensor()  # a constant of another kind has no memory to free
