# SPDX-License-Identifier: Apache-2.0
"""The module that `fabric.setup` returns."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import override

from fabric.plugins.precision import Precision
from fabric.strategies import Strategy
from fabric.strategies.entry import _Entry
from fabric.utilities.parameter_names import plain_name, under_own_names, with_plain_names

MARKED_FROM_THE_START = ("forward", "training_step", "validation_step", "test_step", "predict_step")

# What stays on the wrapper; every other attribute is the user's module's.
_OWN = frozenset(
    ("_original_module", "_forward_module", "_strategy", "_precision", "_call", "_entered", "_wrapped", "_plain")
) | {"_marked", "_compiled_call_impl"}

# `nn.Module` methods that would otherwise act on the wrapper. Those that return `self` return the wrapper.
_DELEGATED = (
    *("add_module", "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "eval", "extra_repr", "float"),
    *("get_buffer", "get_extra_state", "get_parameter", "get_submodule", "half", "ipu", "modules", "mtia"),
    *("named_children", "named_modules", "parameters", "register_backward_hook", "register_buffer"),
    *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    *("register_full_backward_pre_hook", "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook"),
    *("register_module", "register_parameter", "register_state_dict_post_hook", "register_state_dict_pre_hook"),
    *("requires_grad_", "set_extra_state", "set_submodule", "share_memory", "to", "to_empty", "train", "type", "xpu"),
    *("_apply", "_load_from_state_dict", "_save_to_state_dict"),
)


class _FabricModule(Module):
    """The user's module, called through the strategy and the precision; in all else it shows the user's module.

    Args:
        forward_module: What the strategy made of the module; this is what a forward calls.
        strategy: The strategy.
        original_module: The user's module; by default `forward_module`.
    """

    def __init__(self, forward_module: Module, strategy: Strategy, original_module: Module | None = None) -> None:
        super().__init__()
        original = forward_module if original_module is None else original_module
        precision = strategy.precision
        entered = any(isinstance(module, _Entry) for module in forward_module.modules())
        # A wrapper that was given `_Entry` is told which method to call.
        call = partial(forward_module, "forward") if entered else forward_module
        self.__dict__.update(
            _original_module=original,
            _forward_module=forward_module,
            _strategy=strategy,
            _precision=precision,
            _call=partial(_run_converted, precision, call) if precision.changes_forward else call,
            _entered=entered,
            _wrapped=getattr(forward_module, "_orig_mod", forward_module) is not original,
            _plain=not precision.changes_forward,
            _marked=set(MARKED_FROM_THE_START),
            # The very same tables, for the places in PyTorch that read them and not the methods.
            _parameters=original._parameters,
            _buffers=original._buffers,
            _modules=original._modules,
            _non_persistent_buffers_set=original._non_persistent_buffers_set,
        )

    @property
    def module(self) -> Module:
        """The user's own module."""
        return self.__dict__["_original_module"]  # type: ignore[no-any-return]

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module through the precision and the strategy."""
        return self._call(*args, **kwargs)

    # marked methods

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Let a method of the user's module go through strategy and precision as `forward` does.

        Args:
            method: Its name, or the bound method.

        Raises:
            AttributeError: If the module has no such method.
            TypeError: If it is a generator, which runs only after the call has returned.
        """
        name = method if isinstance(method, str) else method.__name__
        found = getattr(self.module, name, None)
        if not callable(found):
            raise AttributeError(
                f"`mark_forward_method({name!r})`: `{type(self.module).__name__}` has no method `{name}`."
                " Pass the name of one of its methods."
            )
        if inspect.isgeneratorfunction(found):
            raise TypeError(
                f"`mark_forward_method({name!r})`: `{type(self.module).__name__}.{name}` is a generator, which runs"
                " only after the call has returned. Mark the method that computes one item, and call that in a loop."
            )
        self._marked.add(name)

    def _through_strategy(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method `name` as a user of the wrapper should call it."""
        if name not in self._marked:
            return self._guarded(name, method) if self._wrapped or not self._plain else method
        if self._wrapped and not self._entered:
            raise RuntimeError(
                f"`{type(self.module).__name__}.{name}` can't go through `{type(self._strategy).__name__}`: its"
                " `setup_module` wrapped the module itself. Let it wrap `fabric.strategies.entry._Entry(module)`."
            )
        call = partial(self._forward_module, name) if self._wrapped else method
        through = call if self._plain else partial(_run_converted, self._precision, call)
        return through if through is method else wraps(method)(through)

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """An unmarked method, which must not run submodules past the strategy."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._plain and not torch.is_grad_enabled() and not self._strategy.shards_parameters:
                return method(*args, **kwargs)
            with _refuse_forward(self.module, name):
                return method(*args, **kwargs)

        @wraps(method)
        def items(*args: Any, **kwargs: Any) -> Iterator[Any]:
            iterator = method(*args, **kwargs)
            while (item := step(iterator, _END)) is not _END:
                yield item

        step = self._guarded(name, next) if inspect.isgeneratorfunction(method) else next
        return items if inspect.isgeneratorfunction(method) else call

    # attributes

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode."""
        return self.module.training

    @training.setter
    def training(self, value: bool) -> None:
        if "_original_module" in self.__dict__:  # `Module.__init__` sets it too
            self.module.training = value

    def __getattr__(self, name: str) -> Any:
        """Whatever the wrapper does not have is the user's module's."""
        if "_original_module" not in self.__dict__:
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}` before its constructor ran.")
        module = self.module
        descriptor = inspect.getattr_static(type(module), name, None)
        if isinstance(descriptor, property) and descriptor.fget is not None:
            return descriptor.fget(module)  # past `Module.__getattr__`, which hides an error inside the property
        attribute = getattr(module, name)
        if inspect.ismethod(attribute) and attribute.__self__ is module and not hasattr(Module, name):
            return self._through_strategy(name, attribute)
        return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in _OWN or "_original_module" not in self.__dict__ or name == "training"
        if own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __repr__(self) -> str:
        return repr(self.module)

    # state under plain names

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """The user's parameters, without wrapper segments in their names."""
        for name, parameter in self.module.named_parameters(*args, **kwargs):
            yield plain_name(name), parameter

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The user's buffers, without wrapper segments in their names."""
        for name, buffer in self.module.named_buffers(*args, **kwargs):
            yield plain_name(name), buffer

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the user's module, without wrapper segments in its names."""
        state = self.module.state_dict(*args, **kwargs)
        # As a part of something else, such as `torch.compile(fabric_model)`, it adds to a dictionary of the other's.
        return state if args or "destination" in kwargs else with_plain_names(state)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state whose names may or may not have wrapper segments; of full tensors each rank takes its part.

        Raises:
            ValueError: With `assign=True`, if the module is sharded.
        """
        own = under_own_names(state_dict, self.module)
        if not assign:
            return self._strategy.load_module_state_dict(self.module, own, strict=strict)
        if self._strategy.shards_parameters:
            raise ValueError(
                f"`{type(self.module).__name__}.load_state_dict(assign=True)` would replace the shards that the"
                " optimizer knows. Leave `assign` out: the values are copied into them."
            )
        return self.module.load_state_dict(own, strict=strict, assign=True)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self.module.zero_grad(set_to_none)
        if self._strategy.shards_parameters:
            self._strategy.drop_unsent(self.module.parameters())

    # copies are plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        self._refuse_parts("copy.deepcopy(model)")
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_parts("pickle.dumps(model)")
        return _itself, (self.module,)

    def _refuse_parts(self, call: str) -> None:
        if self._strategy.shards_parameters:
            raise TypeError(
                f"`{call}`: this rank holds only a part of `{type(self.module).__name__}`, which"
                f" `{type(self._strategy).__name__}` has divided. Save it by `fabric.save(path, {{'model': model}})` on"
                " all ranks and load that into a model that is made anew."
            )


def _run_converted(precision: Precision, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = precision.convert_input((args, kwargs))
    with precision.forward_context():
        output = call(*args, **kwargs)
    return precision.convert_output(output)


def _delegate(name: str) -> Callable[..., Any]:
    @wraps(getattr(Module, name))
    def method(self: _FabricModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.module, name)(*args, **kwargs)
        return self if result is self.module else result

    return method


for _name in _DELEGATED:
    setattr(_FabricModule, _name, _delegate(_name))


_END = object()  # what a generator that is through gives


def _itself(module: Module) -> Module:
    return module


@contextmanager
def _refuse_forward(module: Module, name: str) -> Iterator[None]:
    """Raise when a submodule's forward is reached inside; the hooks that tell are gone afterwards."""

    def refuse(submodule: Module, args: Any) -> None:
        owner = type(module).__name__
        raise RuntimeError(
            f"`{owner}.{name}()` reached the forward of `{type(submodule).__name__}` past the strategy and the"
            " precision, so gradients would not be synchronised or dtypes not converted."
            f" Mark it once after setup: `model.mark_forward_method({name!r})`."
        )

    hooks = [submodule.register_forward_pre_hook(refuse) for submodule in module.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
