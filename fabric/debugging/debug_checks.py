# SPDX-License-Identifier: Apache-2.0
"""The checks of debug mode."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from fabric.debugging.checks import Checks
from fabric.debugging.exchange import Exchange
from fabric.debugging.finite import describe_values, fault_of, tensors_in
from fabric.debugging.hashing import fingerprint
from fabric.debugging.hooks import ModuleHook
from fabric.debugging.record import Record, describe_tensors, find_place, validate_same
from fabric.debugging.replicas import compare
from fabric.debugging.tracing import FiniteTracer, any_gradient
from fabric.strategies import Strategy
from fabric.strategies.entry import _Entry
from fabric.utilities.rank_zero import rank_zero_warn

T = TypeVar("T")

# The methods of Fabric in which ranks wait for each other; others may be called by one rank alone.
_COLLECTIVE = frozenset(
    (
        *("barrier", "broadcast", "all_gather", "all_reduce", "gather_for_metrics", "weighted_mean"),
        *("any_rank", "all_ranks", "accumulate", "join_uneven_inputs", "rank_zero_first", "log_dict"),
        *("save", "load", "load_raw", "state_dict"),
        *("setup", "setup_module", "setup_optimizers", "setup_dataloaders"),
    )
)
_PARAMETERS_ADVICE = (
    "They were equal at setup, so not all ranks have applied the same updates since. Look for parameters that are"
    " changed past `optimizer.step()`, gradients that are changed after backward, or steps that not all ranks take."
)
_BUFFERS_ADVICE = "The strategy makes them equal before a forward. Look for buffers that it does not know of."
_BATCH_ADVICE = (
    "These ranks share a part of the data, so they must read the same batches. Look for a sampler or an augmentation"
    " that is seeded by the global rank; shard by `strategy.distributed_sampler_kwargs`."
)


class DebugChecks(Checks):
    """Compares the ranks at each collective and traces NaN and Inf to the module that makes them.

    Args:
        strategy: The strategy; it need not be bound yet.
        timeout: Seconds that a rank waits for the others at a collective.
        every: Steps of an optimizer after which its parameters are compared over the ranks.
    """

    def __init__(self, strategy: Strategy, *, timeout: float, every: int) -> None:
        self._strategy = strategy
        self._timeout = timeout
        self._every = every
        self._is_uneven = False
        self._exchange: Exchange | None = None
        self._same_data: tuple[int, ...] = ()  # the ranks that read the same batches as this one
        self._handles: list[Any] = []
        self._tracer: FiniteTracer | None = None

    @override
    def enter(self) -> None:
        strategy = self._strategy
        self._modules: WeakKeyDictionary[Module, None] = WeakKeyDictionary()  # in the order of setup, on all ranks
        self._steps: list[int] = []  # of each optimizer that was set up
        self._buffers_due: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()
        self._tracer = FiniteTracer(self._leave, traces_backward=not strategy.precision.skips_nonfinite_steps)
        if strategy.world_size > 1:
            self._exchange = Exchange(strategy, self._timeout)
            parts = strategy.gather_objects(strategy.distributed_sampler_kwargs["rank"])
            own = parts[strategy.global_rank]
            self._same_data = tuple(rank for rank, part in enumerate(parts) if part == own)

    @override
    def leave(self) -> None:
        if self._tracer is not None:
            self._tracer.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        file, line = find_place()
        self._leave(f"It left the job at {file}:{line}.")
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._tracer = None

    def _leave(self, reason: str) -> None:
        if self._exchange is not None:
            self._exchange.leave(reason)

    # collectives

    @override
    def call(self, name: str, /, *data: Any, **options: Any) -> None:
        if self._exchange is None or name not in _COLLECTIVE:
            return
        group = options.pop("group", None)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            return  # this rank is no member of it
        ranks = None if group is None else dist.get_process_group_ranks(group)
        must_agree = describe_tensors(_parameters_of(data), ragged=options.get("pad_value") is not None)
        must_agree += [f"{option}={value!r}" for option, value in options.items() if value is not None]
        self._meet(f"`fabric.{name}`", must_agree, ranks)
        if name == "save":
            for module in list(self._modules):
                self._compare_parameters(f"the parameters of `{type(module).__name__}` at save", module)

    def _meet(self, call: str, must_agree: Sequence[str] = (), ranks: Sequence[int] | None = None) -> None:
        if self._exchange is not None:
            record = Record(self._exchange.rank, call, *find_place(), tuple(must_agree))
            validate_same(self._exchange.meet(record, ranks))

    @override
    @contextmanager
    def uneven(self, context: AbstractContextManager[T]) -> Iterator[T]:
        with context as value:
            self._is_uneven = True
            try:
                yield value
            finally:
                self._is_uneven = False

    # modules

    @override
    def watch(self, forward_module: Module, module: Module, *, compiled: bool) -> None:
        assert self._tracer is not None
        self._modules[module] = None
        if compiled:
            rank_zero_warn(
                f"Debug mode can't look into `{type(module).__name__}`, which is compiled: neither NaN nor its backward"
                " is traced. Leave `torch.compile` out while you look for an error."
            )
            return
        self._tracer.attach(module)
        if self._exchange is None:
            return
        self._handles.append(forward_module.register_forward_hook(ModuleHook(self._before_backward)))
        entry = next((inner for inner in forward_module.modules() if isinstance(inner, _Entry)), module)
        hook = ModuleHook(partial(self._compare_buffers, ref(module), ref(forward_module)))
        self._buffers_due[module] = True
        self._handles.append(entry.register_forward_pre_hook(hook))

    def _before_backward(self, forward_module: Module, args: Any, output: Any) -> None:
        """Runs after each forward: whether its backward communicates is decided here, as PyTorch does."""
        if torch.is_grad_enabled() and not self._is_uneven and self._strategy.syncs_backward(forward_module):
            any_gradient(output, lambda: self._meet("`fabric.backward`"))

    def _compare_buffers(self, own: ref[Module], forward: ref[Module], *_: Any) -> None:
        module, forward_module = own(), forward()
        if module is None or forward_module is None or self._is_uneven or not torch.is_grad_enabled():
            return
        if self._buffers_due.get(module, False) and self._strategy.has_synced_buffers(forward_module):
            self._buffers_due[module] = False
            what = f"the buffers of `{type(module).__name__}` in forward"
            self._compare(what, module.named_buffers(), _BUFFERS_ADVICE)

    def _compare_parameters(self, what: str, module: Module, only: set[int] | None = None) -> None:
        named = ((name, p) for name, p in module.named_parameters() if only is None or id(p) in only)
        self._compare(what, named, _PARAMETERS_ADVICE)

    def _compare(self, what: str, named: Any, advice: str) -> None:
        prints: dict[tuple[int, ...], dict[str, str]] = {}
        for name, tensor in named:
            prints.setdefault(self._strategy.replicas_of(tensor), {})[name] = fingerprint(tensor)
        for ranks, of_ranks in prints.items():  # in the order of the names, so alike on all ranks
            if self._exchange is not None and len(ranks) > 1:
                compare(self._exchange, what, of_ranks, ranks, advice)

    # optimizers

    @override
    def watch_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            number = len(self._steps)
            self._steps.append(0)
            self._handles += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(partial(self._after_step, number)),
            ]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A gradient that is not finite, after all that was done to it since backward."""
        if self._strategy.precision.skips_nonfinite_steps:
            return
        own = _ids_of(optimizer)
        for module in list(self._modules):
            for name, parameter in module.named_parameters():
                gradients = tensors_in(parameter.grad if id(parameter) in own else None)
                if (fault := fault_of(gradients)) is not None:
                    label = f"`{name}` (in `{type(module).__name__}`)"
                    text = f"The gradient of {label} has {fault} at `optimizer.step()`, and had none in backward."
                    text = "\n".join([text, *describe_values("gradient", gradients)])
                    self._leave(text)
                    raise FloatingPointError(text)

    def _after_step(self, number: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_uneven:
            return
        self._steps[number] += 1
        steps = self._steps[number]
        if steps % self._every:
            return
        for module in list(self._modules):
            what = f"the parameters of `{type(module).__name__}` after step {steps} of optimizer {number}"
            self._compare_parameters(what, module, _ids_of(optimizer))
            self._buffers_due[module] = True

    # data

    @override
    def batches(self, move: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        if len(self._same_data) < 2:
            return move

        def check(batch: Any) -> Any:
            self.same_data("the batch of a loader", batch)
            return batch if move is None else move(batch)

        return check

    @override
    def same_data(self, name: str, batch: Any) -> None:
        if self._exchange is not None and len(self._same_data) > 1:
            compare(self._exchange, name, {"batch": fingerprint(batch)}, self._same_data, _BATCH_ADVICE)


def _ids_of(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _parameters_of(data: Any) -> list[Any]:
    """Modules by their parameters, everything else as it is."""
    return [list(item.parameters()) if isinstance(item, Module) else item for item in data]
