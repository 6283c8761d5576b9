# SPDX-License-Identifier: Apache-2.0
"""Creating modules without spending time on their random initial values, and giving them these later."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from fabric.utilities.parameter_names import plain_name
from fabric.utilities.recording import recording_context
from fabric.utilities.replay import replay


class _SkipInit(TorchFunctionMode):
    """Turns the functions of `torch.nn.init` that fill a tensor into no-ops."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def skip_init_context(device: torch.device) -> Iterator[None]:
    """Modules created inside have their parameters on `device`, with values that are not initialised."""
    with device, _SkipInit():
        yield


def own_tensors(module: Module) -> Iterator[tuple[Module, str, Tensor]]:
    """Each parameter and buffer below a module: the module that owns it, its name there, and the tensor.

    One with several owners comes several times.
    """
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield owner, name, tensor


def initialise(module: Module, wanted: Callable[[Module], bool]) -> None:
    """Let modules give themselves values, those inside of others first, as in a constructor.

    A module says how in `reset_parameters()`, as PyTorch's own do, or in `init_weights()`. A root without the latter
    may have `_init_weights(module)`, which is then called for each of its modules, as Hugging Face's models do it.

    Args:
        module: The root.
        wanted: Which modules are to do so.
    """
    for child in _inside_out(module, set()):
        if wanted(child):
            for call in _initialisers(child):
                _call_on_meta(child, call)
    each = getattr(module, "_init_weights", None)
    if callable(each) and wanted(module) and not callable(getattr(module, "init_weights", None)):
        for child in _inside_out(module, set()):
            _call_on_meta(module, each, child)


def _call_on_meta(owner: Module, call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except Exception as error:
        kind, name = type(owner).__name__, getattr(call, "__name__", "reset_parameters")
        raise RuntimeError(
            f"`{kind}.{name}()` can't run on the meta device: {str(error).rstrip('.')}. Let it not read values; or"
            " create the model for real on rank 0, which then hands it on:"
            " `with fabric.init_module(empty_init=not fabric.is_global_zero):`."
        ) from error


def _initialisers(module: Module) -> list[Callable[[], Any]]:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    found = [reset, getattr(module, "init_weights", None)]
    return [call for call in found if callable(call) and _needs_nothing(call)]


def _needs_nothing(call: Callable[..., Any]) -> bool:
    parameters = inspect.signature(call).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _inside_out(module: Module, seen: set[Module]) -> Iterator[Module]:
    """A module's children and their children before it, each once."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _inside_out(child, seen)
        yield module


def put_tensors(found: Iterable[tuple[Module, str, Tensor]], replacement: Callable[[Tensor], Tensor]) -> None:
    """Put other tensors in the place of those that `own_tensors` found; a tensor with several owners stays one.

    Args:
        found: Where they are.
        replacement: The new tensor for an old one; asked once for each.
    """
    new: dict[int, Tensor] = {}
    for owner, name, tensor in list(found):
        if id(tensor) not in new:
            new[id(tensor)] = _of_same_kind(replacement(tensor), tensor)
        if type(owner).__setattr__ is not Module.__setattr__:
            setattr(owner, name, new[id(tensor)])  # recurrent layers keep a list of their parameters
            continue
        table = owner._parameters if name in owner._parameters else owner._buffers
        table[name] = new[id(tensor)]  # type: ignore[assignment]


def _of_same_kind(new: Tensor, old: Tensor) -> Tensor:
    if isinstance(old, Parameter) and not isinstance(new, Parameter):
        new = Parameter(new, requires_grad=old.requires_grad)
    if new is not old:
        new.__dict__.update(old.__dict__)  # what users write on parameters, such as which ones get no weight decay
    return new


def place_name(module: Module, owner: Module, name: str) -> str:
    """The plain name of an owner's tensor below a module."""
    prefix = next((prefix for prefix, child in module.named_modules() if child is owner), "")
    return plain_name(f"{prefix}.{name}" if prefix else name)


def no_values(module: Module, missing: Sequence[tuple[Module, str]]) -> str:
    """The error for tensors on the meta device to which nothing gives values.

    Args:
        module: The model.
        missing: Owners and names of the tensors.
    """
    owner, name = missing[0]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    kind = type(owner).__name__
    return (
        f"`{place_name(module, owner, name)}`{more} of `{type(module).__name__}` can't be materialised: it is on the"
        f" meta device, and `{kind}` does not say which values it gets. Create the model inside"
        f" `with fabric.init_module(empty_init=True):`, which notes what its constructor does; or give `{kind}` a"
        f" method `reset_parameters()`; or create the model for real on rank 0, which then hands it on:"
        " `with fabric.init_module(empty_init=not fabric.is_global_zero):`."
    )


class _Place:
    """A tensor on a device."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self.tensor = torch.empty_like(tensor, device=device, requires_grad=False)
        self.dtype = tensor.dtype

    def keep(self, whole: Tensor) -> None:
        self.tensor.copy_(whole)

    def whole(self) -> Tensor:
        return self.tensor


def _materialize_meta_tensors(module: Module, device: torch.device) -> None:
    """Put what a module has on the meta device on a real one, with the values that its modules give themselves.

    Raises:
        RuntimeError: If a module does not say how, by `reset_parameters()` or `init_weights()`.
    """
    with recording_context() as recording:
        initialise(module, lambda child: any(tensor.is_meta for *_, tensor in own_tensors(child)))
    metas = [found for found in own_tensors(module) if found[2].is_meta]
    views = [(found, recording.find(*found)) for found in metas]
    missing = [(owner, name) for (owner, name, _), view in views if view is None]
    if missing:
        raise RuntimeError(no_values(module, missing))
    places = {id(tensor): _Place(tensor, device) for *_, tensor in metas}
    homes = {id(tensor): (view, places[id(tensor)]) for (*_, tensor), view in views if view is not None}
    replay([recording], homes.values(), device)
    put_tensors(metas, lambda tensor: places[id(tensor)].tensor)
