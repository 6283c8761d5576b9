# SPDX-License-Identifier: Apache-2.0
"""Noting what is done to tensors on the meta device, which have no values, in order to do it later for real."""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

# The documented way to see every operation (PyTorch's notes "Extending PyTorch"), in spite of the module's name.
from torch.utils._python_dispatch import TorchDispatchMode

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_OF_DATA = (torch.tensor, torch.as_tensor)
_WITHOUT_VALUES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


@dataclass(frozen=True)
class View:
    """Where in a storage a tensor lies.

    Attributes:
        key: Of the storage.
        dtype: Of the elements.
        size: Shape.
        stride: In elements.
        offset: In elements.
    """

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def layout(self) -> tuple[Any, ...]:
        """Everything but the storage."""
        return self.dtype, self.size, self.stride, self.offset

    def fills(self, storage: UntypedStorage) -> bool:
        """Whether the tensor is all that the storage holds, in its order."""
        contiguous = torch.empty(self.size, device="meta").stride() == self.stride
        return contiguous and self.offset == 0 and math.prod(self.size) * self.dtype.itemsize == storage.nbytes()


def view_of(tensor: Tensor) -> View:
    """The place of a tensor. Storages are told apart by the object that PyTorch gives for them while one is held."""
    key = id(tensor.untyped_storage())
    return View(key, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class Step(NamedTuple):
    """One thing that was done.

    Attributes:
        call: What was called.
        args: With views in the place of tensors on the meta device.
        kwargs: Likewise.
        results: The tensors among what was returned, likewise; None for those that were not on the meta device.
        uses: The keys of the storages that it reads or writes.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View | None, ...]
    uses: frozenset[int]

    @property
    def overwrites(self) -> View | None:
        """What gets values that do not depend on those before."""
        name = getattr(self.call, "__name__", "").split(".")[0]
        filled = name in ("uniform_", "normal_", "fill_", "zero_") or getattr(self.call, "__module__", "") == _INIT
        return self.args[0] if filled else None


class _Registered(NamedTuple):
    """A tensor as a module was given it. Neither is held: a recording must not keep a model in memory."""

    module: ref[Module]
    tensor: ref[Tensor]
    view: View
    version: int


_INIT = "torch.nn.init"


class Recording:
    """What was done, in order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.storages: dict[int, UntypedStorage] = {}  # held, so that their ids stay theirs
        self.start: Any = None  # the states of the random number generators with which it was done for the first time
        self._written: set[int] = set()
        self._registered: dict[tuple[int, str], _Registered] = {}

    def note(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Add what was called, if it gave values to a tensor on the meta device."""
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_meta]
        made = [tensor for tensor in tensors_in(result) if tensor.is_meta]
        if not given and not made:
            return
        uses = {self._hold(tensor) for tensor in given}
        new = {self._hold(tensor) for tensor in made} - uses
        written = {self._hold(tensor) for tensor in _written_by(call, args, kwargs) if tensor.is_meta}
        if getattr(call, "__name__", "").split(".")[0] in _WITHOUT_VALUES or not (new or written):
            return  # no values, or a view or a question
        self._written |= new | written
        args, kwargs = mapped((args, kwargs), _kept)
        results = tuple(view_of(tensor) if tensor.is_meta else None for tensor in tensors_in(result))
        self.steps.append(Step(call, args, kwargs, results, frozenset(uses | new)))

    def register(self, module: Module, name: str, tensor: Tensor | None) -> None:
        """Note a parameter or buffer that a module is given."""
        if tensor is not None and tensor.is_meta:
            self._hold(tensor)
            known = _Registered(ref(module), ref(tensor), view_of(tensor), tensor._version)
            self._registered[id(module), name] = known

    def close(self) -> None:
        """The end: what is written into parameters from now on is not seen."""
        for place, old in self._registered.items():
            tensor = old.tensor()
            if tensor is not None:
                self._hold(tensor)
                self._registered[place] = _Registered(old.module, old.tensor, view_of(tensor), tensor._version)

    def find(self, module: Module, name: str, tensor: Tensor) -> View | None:
        """Where the values of a module's tensor are made; None if not here.

        Args:
            module: The module that owns the tensor.
            name: The tensor's name in that module.
            tensor: The tensor, which may have been converted to another dtype after the recording.
        """
        view = view_of(tensor)
        if view.key in self.storages:
            return view if view.key in self._written else None
        known = self._known(module, name)
        if known and known.view.size == view.size and known.view.dtype != view.dtype:
            return known.view if known.view.key in self._written else None
        return None

    def was_changed(self, module: Module, name: str) -> bool:
        """Whether somebody wrote into a module's tensor after the recording, where nothing is written."""
        known = self._known(module, name)
        tensor = known.tensor() if known is not None else None
        return known is not None and tensor is not None and tensor._version != known.version

    def _known(self, module: Module, name: str) -> _Registered | None:
        known = self._registered.get((id(module), name))
        return known if known is not None and known.module() is module else None

    def _hold(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.storages[id(storage)] = storage
        return id(storage)

    def describe(self) -> Iterator[str]:
        """A line for each step, equal in all processes that did the same."""
        for step in self.steps:
            told = mapped((step.args, step.kwargs), _told)
            yield re.sub(r" at 0x[0-9a-f]+", "", f"{getattr(step.call, '__name__', '')} {told}")


@contextmanager
def recording_context() -> Iterator[Recording]:
    """Tensors and modules made inside are on the meta device, and what would give them values is noted."""
    recording = Recording()
    hooks = (
        register_module_parameter_registration_hook(recording.register),
        register_module_buffer_registration_hook(recording.register),
    )
    try:
        with torch.device("meta"), _Functions(recording), _Operations(recording):
            yield recording
    finally:
        for hook in hooks:
            hook.remove()
        recording.close()


class _Operations(TorchDispatchMode):
    """Notes PyTorch's operations."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recording.note(func, args, kwargs or {}, result)
        return result


class _Functions(TorchFunctionMode):
    """Notes what would leave no trace among the operations."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_DATA and not isinstance(args[0] if args else None, Tensor):
            return _with_its_data(func, args, kwargs)
        result = func(*args, **kwargs)
        if func == _IS_META and result:
            self._note_skipped(inspect.currentframe())
        return result

    def _note_skipped(self, frame: FrameType | None) -> None:
        """`torch.nn.init` asks tensors whether they are on the meta device, to do nothing then."""
        caller = frame.f_back if frame is not None else None
        if caller is None or caller.f_globals.get("__name__") != _INIT:
            return
        values = inspect.getargvalues(caller)
        tensor, *others = values.args
        kwargs = {name: values.locals[name] for name in others}
        self._recording.note(caller.f_globals[caller.f_code.co_name], (values.locals[tensor],), kwargs, None)


def _with_its_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`torch.tensor(data)` on the meta device forgets the data: make it on the CPU, and move it as an operation."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "meta":
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    asked = kwargs.pop("requires_grad", False)
    tensor: Tensor = func(*args, **(kwargs | {"device": "cpu"}))
    # Hugging Face's models leave out their initialisation where `torch.tensor([])` is on the meta device. Without any
    # elements it may as well stay where it is.
    return (tensor.to("meta") if tensor.numel() else tensor).requires_grad_(asked)


def _written_by(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors into which a call writes."""
    schema = getattr(call, "_schema", None)  # each operation's own account of itself, which has no public name
    if schema is None:
        yield args[0]  # a function of `torch.nn.init`
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def _kept(tensor: Tensor) -> Tensor | View:
    """What a step keeps of a tensor: of one with values, these as they are now."""
    return view_of(tensor) if tensor.is_meta else tensor.detach().clone()


def _told(value: Tensor | View) -> str:
    return f"{value.layout}" if isinstance(value, View) else f"{value.dtype} {list(value.shape)}"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def mapped(value: Any, convert: Callable[[Any], Any], device: torch.device | None = None) -> Any:
    """Arguments with something else for tensors and views, and with another device in the place of the meta device."""
    if isinstance(value, Tensor | View):
        return convert(value)
    if isinstance(value, torch.device) and value.type == "meta":
        return device or value
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, convert, device) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, convert, device) for key, item in value.items()}
    return value
