# SPDX-License-Identifier: Apache-2.0
"""Checks at the boundary: what `Fabric` is given, before anything is done with it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from fabric.loggers import Logger
from fabric.plan import Plan
from fabric.strategies import Strategy
from fabric.wrappers import _FabricModule, _unwrap_compiled, _unwrap_objects, is_wrapped


def _validate_launch(function: Callable[..., Any] | None, plan: Plan) -> None:
    if function is not None and not callable(function):
        raise TypeError(
            f"`fabric.launch({function!r})` takes a function, to be called as `function(fabric, *args)` on every rank."
        )
    if function is None and plan.launcher.value in ("spawn", "fork", "forkserver"):
        raise TypeError(
            f"`fabric.launch()` starts new processes by {plan.launcher.value} for `strategy={plan.strategy.label!r}`,"
            " which need a function to run. Put the loop into one and call `fabric.launch(function)`."
        )


def _validate_launched(call: str, plan: Plan) -> None:
    if plan.world_size > 1 or plan.launcher.value in ("spawn", "fork", "forkserver"):
        needs = f"the {plan.world_size} processes of this run, and they are"
        if plan.world_size == 1:
            needs = "a process of its own, and it is"
        raise RuntimeError(f"`fabric.{call}(...)` needs {needs} not started yet. Call `fabric.launch()` before it.")


def _validate_module(module: Any, set_up: Mapping[int, Any], strategy: Strategy) -> None:
    if is_wrapped(module) or id(_unwrap_objects(module)) in set_up:
        raise ValueError(
            "This module was set up before. `fabric.setup(model, ...)` takes each module once, as you made it."
        )
    if not isinstance(module, Module):
        raise TypeError(
            f"`fabric.setup(module, *optimizers)` takes a `torch.nn.Module` first, but got `{type(module).__name__}`."
        )
    meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if meta and not strategy.starts_on_meta:
        raise RuntimeError(
            f"`fabric.setup(...)`: `{type(module).__name__}` has {len(meta)} parameters on the meta device,"
            f" the first is `{meta[0]}`. Create it under `fabric.init_module()`, or materialise it with"
            " `module.to_empty(device=...)` and load its weights first."
        )


def _validate_optimizers(optimizers: Sequence[Any], set_up: Mapping[int, Any], *, at_least_one: bool = False) -> None:
    if at_least_one and not optimizers:
        raise ValueError("`fabric.setup_optimizers(*optimizers)` takes at least one optimizer.")
    for optimizer in optimizers:
        if is_wrapped(optimizer) or id(optimizer) in set_up:
            raise ValueError("This optimizer was set up before. Each optimizer is set up once, as you made it.")
        if isinstance(optimizer, list | tuple):
            raise TypeError(
                "Optimizers are passed one by one, not as a list."
                " Write `fabric.setup(model, *optimizers)` or `fabric.setup_optimizers(*optimizers)`."
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"An optimizer must be a `torch.optim.Optimizer`, but got `{type(optimizer).__name__}`."
                " A learning-rate scheduler needs no setup, or goes into `fabric.setup(..., scheduler=...)`."
            )


def _validate_dataloaders(loaders: Sequence[Any]) -> None:
    if not loaders:
        raise ValueError("`fabric.setup_dataloaders(*dataloaders)` takes at least one data loader.")
    for loader in loaders:
        if is_wrapped(loader):
            raise ValueError("This data loader was set up before. Each loader is set up once, as you made it.")
        if not isinstance(loader, DataLoader) and (hint := _why_no_loader(loader)):
            raise TypeError(
                "`fabric.setup_dataloaders(...)` takes data loaders or other iterables over batches, but got"
                f" `{type(loader).__name__}`. {hint}"
            )
        if isinstance(loader, DataLoader) and loader.num_workers > 1 and not getattr(loader, "in_order", True):
            raise ValueError(
                "`DataLoader(in_order=False)` yields batches as its workers finish them, so that the ranks' batches do"
                " not belong together and no place can be gone back to. Leave `in_order` out."
            )


def _why_no_loader(obj: Any) -> str | None:
    """What to pass in the place of something that is no loader; None for anything that can be iterated over."""
    if isinstance(obj, list | tuple) and any(isinstance(item, DataLoader) or is_wrapped(item) for item in obj):
        return "Pass loaders one by one: `setup_dataloaders(*loaders)`."
    if isinstance(obj, Mapping):
        return "Pass loaders one by one: `setup_dataloaders(*loaders.values())`."
    if isinstance(obj, Dataset) and not _ends_in_a_loader(obj):
        return "Wrap it: `torch.utils.data.DataLoader(dataset, batch_size=...)`."
    if isinstance(obj, str | bytes | Tensor | Module | type) or not isinstance(obj, Iterable):
        call = " If it is a function that makes batches, call it." if callable(obj) else ""
        return f"Pass a `torch.utils.data.DataLoader`.{call}"
    return None


def _ends_in_a_loader(dataset: Any) -> bool:
    """WebDataset's `WebLoader` is a data set that reads from a loader."""
    pipeline = getattr(dataset, "pipeline", None)
    return isinstance(pipeline, list) and bool(pipeline) and isinstance(pipeline[0], DataLoader)


def _validate_loading(prefetch: Any, uneven: Any) -> None:
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ValueError(
            f"`fabric.setup_dataloaders(..., prefetch={prefetch!r})` takes the number of batches to move ahead: an"
            " integer, 0 or more."
        )
    if uneven not in ("pad", "stop"):
        raise ValueError(
            f"`fabric.setup_dataloaders(..., uneven={uneven!r})` is not a way to end. Choose one of 'pad', 'stop'."
        )


def _validate_clipping(module: Any, optimizer: Any, clip_val: float | None, max_norm: float | None) -> None:
    if not isinstance(module, Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            "`fabric.clip_gradients(module, optimizer, ...)` takes a module and its optimizer, but got"
            f" `{type(module).__name__}` and `{type(optimizer).__name__}`."
        )
    if clip_val is None and max_norm is None:
        raise ValueError(
            "`fabric.clip_gradients(...)` needs `clip_val=` (for each element) or `max_norm=` (for the norm)."
        )
    if clip_val is not None and max_norm is not None:
        raise ValueError(
            f"`fabric.clip_gradients(clip_val={clip_val!r}, max_norm={max_norm!r})` can't clip by value and by norm."
            " Leave one of them out."
        )


def _validate_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"`fabric.save(path, state)` takes a dictionary of names and objects, but got `{type(state).__name__}`."
            " Write `fabric.save(path, {'model': model, 'step': step})`."
        )


def _validated_loggers(loggers: list[Any]) -> list[Logger]:
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise TypeError(
                f"`Fabric(loggers=...)` takes `Logger` objects, but got `{type(logger).__name__}`."
                " Write `Fabric(loggers=CSVLogger('logs'))`, or subclass `fabric.loggers.Logger`."
            )
    return loggers


def _forward_module_of(module: Any, call: str) -> Module:
    """What the strategy made of a set-up module."""
    module = _unwrap_compiled(module)[0] if isinstance(module, Module) else module
    if not isinstance(module, _FabricModule):
        raise TypeError(
            f"`fabric.{call}` takes a module that `fabric.setup(...)` returned, but got `{type(module).__name__}`."
        )
    return module._forward_module  # type: ignore[no-any-return]
