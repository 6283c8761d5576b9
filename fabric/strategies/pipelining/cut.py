# SPDX-License-Identifier: Apache-2.0
"""Cutting a model's forward at named modules, with `torch.fx`.

[Note: why not the tracer of torch.distributed.pipelining] `pipeline()` exports the model down to single operators, for
one example input: shapes, `train()` or `eval()`, autocast and whatever hooks do are frozen into what runs afterwards.
Here only the forwards of the modules *around* the cuts are traced, without any input. What is inside a stage stays the
user's own modules, called as they are.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.nn import Module

from fabric.strategies.pipelining.asserts import goes_on_with
from fabric.utilities.spelling import suggest

_SHAPE_METHODS = frozenset(("size", "dim", "ndimension", "numel", "stride", "type", "is_floating_point"))
_SHAPE_ATTRIBUTES = frozenset(("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout"))


@dataclass
class Cut:
    """One stage as traced: what to run, once for `train()` and once for `eval()`.

    Args:
        graphs: By `module.training`. Inputs: what the stage before sent, then a dictionary of the model's own inputs.
        calls: The names of the modules that it calls, in order.
        reads: The names of parameters and buffers that a surrounding module's forward uses itself.
    """

    graphs: dict[bool, fx.Graph] = field(default_factory=dict)
    calls: dict[str, None] = field(default_factory=dict)
    reads: dict[str, None] = field(default_factory=dict)


class Surroundings(Module):
    """Calls the model with the inputs that it must be given; all others keep their defaults."""

    def __init__(self, model: Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, inputs: Any) -> Any:
        """Call the model with the entries of a dictionary."""
        return self.model(**{name: inputs[name] for name in self.names})


def cut_model(module: Module, split_at: Sequence[str]) -> list[Cut]:
    """Cut the forward of a model before each of the named modules.

    Args:
        module: The user's model.
        split_at: Names of submodules; the first call of each begins a stage.

    Raises:
        ValueError: If there is no such module, forward never calls it, two begin at one place, or the forward around
            them can't be traced.
    """
    _validate_names(module, split_at)
    opened = {""} | {name[:dot] for name in split_at for dot in range(len(name)) if name[dot] == "."}
    opened |= {name for name in split_at if any(other.startswith(f"{name}.") for other in split_at)}
    cuts = [Cut() for _ in range(len(split_at) + 1)]
    surroundings = Surroundings(module, Inputs(module).names)
    for training in (True, False):
        with _mode(module, opened, training):
            nodes = _trace(surroundings, opened)
        places = _places(module, nodes, split_at)
        for stage, graph in enumerate(_Cutter(nodes, places).graphs()):
            _note(cuts[stage], graph, training)
    return cuts


class Inputs:
    """The inputs of a model's forward by name: those without a default, since the others keep theirs.

    Args:
        module: The user's model.
    """

    def __init__(self, module: Module) -> None:
        self._owner = type(module).__name__
        self._signature = inspect.signature(module.forward)
        parameters = self._signature.parameters.values()
        fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.names = [each.name for each in parameters if each.default is each.empty and each.kind not in fixed]

    def bind(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The inputs of one call.

        Raises:
            TypeError: If the forward does not take them.
            ValueError: If one of them has a default.
        """
        bound = self._signature.bind(*args, **kwargs).arguments
        for name, value in bound.items():
            if name not in self.names and value is not self._signature.parameters[name].default:
                raise ValueError(
                    f"`{self._owner}.forward({name}=...)` can't be given to a model that `split_at` cuts: inputs with a"
                    f" default keep it. Remove the default of `{name}`, or give the stages yourself:"
                    " `PipelineParallelStrategy(stages=...)`."
                )
        return {name: bound[name] for name in self.names}


def _validate_names(module: Module, split_at: Sequence[str]) -> None:
    known = [name for name, _ in module.named_modules() if name]
    for number, name in enumerate(split_at):
        if name not in known:
            near = suggest(name, known if len(known) <= 20 else [each for each in known if "." not in each])
            raise ValueError(
                f"`PipelineParallelStrategy(split_at=...)` names `{name}`, which `{type(module).__name__}` does not"
                f" have. {near}"
            )
        if name in split_at[:number]:
            raise ValueError(f"`PipelineParallelStrategy(split_at=...)` names `{name}` twice. Name it once.")


@contextmanager
def _mode(module: Module, names: set[str], training: bool) -> Iterator[None]:
    """Let only the modules that are traced believe that they are in this mode."""
    before = {name: module.get_submodule(name).training for name in names}
    try:
        for name in names:
            module.get_submodule(name).training = training
        yield
    finally:
        for name, value in before.items():
            module.get_submodule(name).training = value


class _Tracer(fx.Tracer):
    """Looks into the modules around the cuts only."""

    def __init__(self, opened: set[str]) -> None:
        super().__init__()
        self._opened = {f"model.{name}".rstrip(".") for name in opened}

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A check becomes one that runs with the stage; nothing else may depend on the value of a tensor."""
        frame = inspect.currentframe()
        caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
        truth = None if caller is None else goes_on_with(caller)
        if caller is None or truth is None:
            return super().to_bool(obj)
        self.create_proxy("call_function", check, (obj, truth, caller.f_code.co_filename, caller.f_lineno), {})
        return truth


def check(condition: Any, truth: bool, file: str, line: int) -> None:
    """An `assert`, or an `if` that raises, in a forward that was traced."""
    if bool(condition) is not truth:
        raise AssertionError(f"what line {line} of {file} checks does not hold")


def _trace(surroundings: Surroundings, opened: set[str]) -> list[fx.Node]:
    owner = type(surroundings.model).__name__
    try:
        return list(_Tracer(opened).trace(surroundings).nodes)
    except Exception as error:
        inside = ", ".join(f"`{name or owner}`" for name in sorted(opened))
        raise ValueError(
            f"`PipelineParallelStrategy(split_at=...)` can't cut `{owner}`: the forward of {inside} can't be traced"
            f" ({type(error).__name__}: {error}). A forward that is cut may call modules and operations one after"
            " another, but not decide on the values of tensors. Move that into a submodule, or give the stages"
            " yourself: `PipelineParallelStrategy(stages=...)`."
        ) from error


def _places(module: Module, nodes: list[fx.Node], split_at: Sequence[str]) -> list[int]:
    """At which nodes the stages begin, but the first."""
    places: dict[int, str] = {}
    for name in split_at:
        within = (f"model.{name}", f"model.{name}.")
        calls = (n for n, node in enumerate(nodes) if node.op == "call_module")
        place = next((n for n in calls if f"{nodes[n].target}." == within[1] or _is_in(nodes[n], within[1])), None)
        if place is None:
            raise ValueError(
                f"`PipelineParallelStrategy(split_at=...)` names `{name}`, which `{type(module).__name__}.forward`"
                " never calls. Name a module that it calls."
            )
        if place in places or not any(node.op == "call_module" for node in nodes[:place]):
            other = (
                f"`{places[place]}` begins at the same place" if place in places else "no module is called before it"
            )
            raise ValueError(
                f"`PipelineParallelStrategy(split_at=...)`: cutting at `{name}` would leave a stage empty, since"
                f" {other}. Leave it out."
            )
        places[place] = name
    return sorted(places)


def _is_in(node: fx.Node, prefix: str) -> bool:
    return isinstance(node.target, str) and node.target.startswith(prefix)


def _note(cut: Cut, graph: fx.Graph, training: bool) -> None:
    cut.graphs[training] = graph
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            name = str(node.target).removeprefix("model.")
            (cut.calls if node.op == "call_module" else cut.reads)[name] = None


class _Cutter:
    """Divides the nodes of one trace over stages.

    A value that depends on no module is computed anew wherever it is needed, since every rank has the model's inputs;
    so are the shapes of tensors. All other values that a later stage needs are sent from stage to stage.
    """

    def __init__(self, nodes: list[fx.Node], places: list[int]) -> None:
        self._nodes = nodes
        self._num_stages = len(places) + 1
        self._stages: dict[fx.Node, int | None] = {}
        for number, node in enumerate(nodes):
            stage = sum(place <= number for place in places)
            self._stages[node] = None if self._is_local(node) else stage
        self._stages[nodes[-1]] = len(places)  # the output
        self._received: list[dict[fx.Node, None]] = [{} for _ in range(self._num_stages)]
        for node in nodes:
            for needed in node.all_input_nodes:
                self._require(needed, self._home(node))

    def graphs(self) -> Iterator[fx.Graph]:
        """One graph for each stage."""
        for stage in range(self._num_stages):
            if stage and not self._received[stage]:
                raise ValueError(
                    f"`PipelineParallelStrategy(split_at=...)`: stage {stage} needs nothing from the stages before it,"
                    " so they would train nothing. Cut where a result is handed on."
                )
            yield self._graph(stage)

    def _is_local(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return True
        return node.op.startswith(("call_function", "call_method")) and all(
            self._stages[needed] is None for needed in node.all_input_nodes
        )

    def _home(self, node: fx.Node) -> int:
        """Where a node surely runs: a value that depends on no module, in the first stage if nothing else needs it."""
        return self._stages[node] or 0

    def _require(self, node: fx.Node, stage: int) -> None:
        home = self._stages[node]
        if home is None or home == stage:
            return
        if _is_shape(node):
            for needed in node.all_input_nodes:
                self._require(needed, stage)
            return
        for later in range(home + 1, stage + 1):
            self._received[later][node] = None

    def _graph(self, stage: int) -> fx.Graph:
        graph = fx.Graph()
        values = {node: graph.placeholder(f"received_{number}") for number, node in enumerate(self._received[stage])}
        values[self._nodes[0]] = graph.placeholder("inputs")

        def value(node: fx.Node) -> fx.Node:
            if node not in values:
                for needed in node.all_input_nodes:
                    value(needed)
                values[node] = graph.node_copy(node, value)
            return values[node]

        for node in self._nodes[1:-1]:
            if self._stages[node] == stage or (stage == 0 and self._stages[node] is None and not node.users):
                value(node)
        if stage == self._num_stages - 1:
            output: Any = fx.map_arg(self._nodes[-1].args[0], value)
        else:
            output = tuple(value(node) for node in self._received[stage + 1])
        graph.output(output)
        return graph


def _is_shape(node: fx.Node) -> bool:
    """Whether it is the shape of a tensor, or so, or a part of that."""
    if node.op == "call_method":
        return node.target in _SHAPE_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _SHAPE_ATTRIBUTES
    source = node.args[0] if node.args else None
    return node.target is operator.getitem and isinstance(source, fx.Node) and _is_shape(source)


def build(graph: fx.Graph, surroundings: Surroundings) -> Callable[..., Any]:
    """A module that runs a graph with the user's own submodules; made once these are on their device."""
    return fx.GraphModule(surroundings, graph, class_name=type(surroundings.model).__name__)
