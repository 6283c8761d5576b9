# SPDX-License-Identifier: Apache-2.0
"""NaN and Inf, traced to the first module that makes one, in forward and in backward."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module

from fabric.debugging.finite import describe_values, fault_of, is_new, tensors_in
from fabric.debugging.hooks import ModuleHook
from fabric.utilities.apply_func import apply_to_tensors

_STAMP = "fabric.debugging"  # in the metadata of a node: when it was found


class FiniteTracer:
    """Looks at what each module returns, and at what each node of the graph in between makes of a gradient.

    Nodes are watched, not modules, in backward: PyTorch's backward hooks of modules forbid operations in place on what
    a module returns, and cannot tell which of two branches failed.

    Args:
        report: Called with the text before an error is raised on this rank.
        traces_backward: Whether gradients that are not finite are an error; under a loss scaler they are not.
    """

    def __init__(self, report: Callable[[str], None], *, traces_backward: bool) -> None:
        self._report = report
        self._traces_backward = traces_backward
        self._found = 0  # how many nodes have a stamp
        self._found_before: WeakKeyDictionary[Module, int] = WeakKeyDictionary()
        self._handles: list[Any] = []

    def attach(self, root: Module) -> None:
        """Watch a module and all modules in it, until `detach`."""
        for name, module in root.named_modules():
            label = f"`{name}` (`{type(module).__name__}`)" if name else f"`{type(root).__name__}`"
            after = ModuleHook(partial(self._after, label, not name))
            self._handles += [
                module.register_forward_pre_hook(ModuleHook(self._before)),
                module.register_forward_hook(after, with_kwargs=True),
            ]

    def detach(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._found_before[module] = self._found

    def _after(self, label: str, is_root: bool, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(output)
        fault = fault_of(outputs)
        given = fault_of(inputs) if fault else None
        if is_new(fault, given):
            self._fail(
                f"{label} is the first module in forward that returns {fault}: what it was given has none.",
                describe_values("input", inputs) + describe_values("output", outputs) + _describe_parameters(module),
            )
        if is_root and fault == "NaN":
            self._fail(f"{label} was given NaN: it is in the data.", describe_values("input", inputs))
        if self._traces_backward and torch.is_grad_enabled():
            self._watch_nodes(label, module, inputs, outputs, is_root=is_root)

    def _watch_nodes(
        self, label: str, module: Module, inputs: list[Tensor], outputs: list[Tensor], *, is_root: bool
    ) -> None:
        stops = {tensor.grad_fn for tensor in inputs}
        for node in _nodes_from(outputs, stops, self._found_before.get(module, 0)):
            if _STAMP not in (
                metadata := _metadata_of(node)
            ):  # else it belongs to a module inside, which was through before
                self._found += 1
                metadata[_STAMP] = self._found
                node.register_hook(_NodeHook(self, label, node.name()))
        if is_root:
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(_LossHook(self, label))

    def _fail(self, sentence: str, lines: list[str]) -> None:
        text = "\n".join([sentence, *lines])
        self._report(text)
        raise FloatingPointError(text)


class _NodeHook:
    """Runs when a node has turned the gradients of its outputs into those of its inputs."""

    def __init__(self, tracer: FiniteTracer, label: str, operation: str) -> None:
        self._tracer = tracer
        self._label = label
        self._operation = operation

    def __call__(self, made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
        outputs = tensors_in([tensor for tensor in made if tensor is not None])
        fault = fault_of(outputs)
        if fault is None:
            return
        inputs = tensors_in([tensor for tensor in given if tensor is not None])
        if is_new(fault, fault_of(inputs)):
            self._tracer._fail(
                f"{self._label} is the first module in backward that makes {fault}, in `{self._operation}`: the"
                " gradient that it was given has none.",
                describe_values("gradient it was given", inputs) + describe_values("gradient it made", outputs),
            )


class _LossHook:
    """Runs when the gradient of what the whole model returned is known."""

    def __init__(self, tracer: FiniteTracer, label: str) -> None:
        self._tracer = tracer
        self._label = label

    def __call__(self, gradient: Tensor) -> None:
        if (fault := fault_of(tensors_in(gradient))) is not None:
            self._tracer._fail(
                f"The gradient of what {self._label} returned has {fault}: it comes from the loss, or from"
                " what stands between the model and the loss.",
                describe_values("gradient", [gradient]),
            )


def _describe_parameters(module: Module) -> list[str]:
    """Those of the module's own parameters that are not finite themselves."""
    lines = []
    for name, parameter in module.named_parameters(recurse=False):
        if fault_of(tensors_in(parameter)) is not None:
            lines += describe_values(f"parameter `{name}`", [parameter])
    return lines


def _metadata_of(node: Node) -> dict[str, int]:
    return cast(dict[str, int], node.metadata)  # an attribute, which PyTorch declares as a method


def _nodes_from(outputs: list[Tensor], stops: set[Node | None], found_before: int) -> Iterator[Node]:
    """The nodes between a module's outputs and its inputs; a node that was found before the module ran ends the way."""
    todo = [tensor.grad_fn for tensor in outputs]
    seen: set[Node | None] = {None, *stops}
    while todo:
        node = todo.pop()
        if node in seen or node is None or _metadata_of(node).get(_STAMP, found_before + 1) <= found_before:
            continue
        seen.add(node)
        if node.next_functions:  # else it collects the gradient of a parameter
            yield node
        todo += [following for following, _ in node.next_functions]


def any_gradient(output: Any, function: Callable[[], None]) -> None:
    """Call a function once in each backward in which a gradient reaches a tensor in `output`."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensors.append(tensor)
        return tensor

    apply_to_tensors(output, keep)
    if tensors:
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda gradient: function(), mode="any")
