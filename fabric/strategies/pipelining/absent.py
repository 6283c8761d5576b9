# SPDX-License-Identifier: Apache-2.0
"""Taking out of a model what the other ranks of a pipeline hold."""

from collections.abc import Collection
from functools import partial
from typing import Any

from torch.nn import Module


class Absent(Module):
    """Stands where a submodule was that this rank does not hold, so that all other names stay as they are.

    Args:
        name: Where it stands.
        kind: The class of the submodule.
    """

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self._text = (
            f"`{name}` (`{kind}`) is held by another rank of the pipeline. `fabric.explain()` shows which rank holds"
            " what."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Say that it is not here."""
        raise RuntimeError(self._text)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"No attribute `{name}`: {self.__dict__.get('_text', '')}")

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return "held by another rank of the pipeline"

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The state of the whole model holds entries for it, which are none of this rank's business."""


def strip(module: Module, kept: Collection[int], prefix: str = "") -> None:
    """Take the parameters and buffers out of a module that are not among those kept, in place.

    A submodule that had nothing but these is replaced by an `Absent`, so that its memory is free.

    Args:
        module: The user's model.
        kept: The ids of tensors.
        prefix: Where the module stands in the model.
    """
    everywhere = module.named_modules(remove_duplicate=False)  # one submodule may have several names
    for name, child in [(name, child) for name, child in everywhere if name and "." not in name]:
        tensors = [id(tensor) for tensor in (*child.parameters(), *child.buffers())]
        if tensors and not any(tensor in kept for tensor in tensors):
            setattr(module, name, Absent(f"{prefix}{name}", type(child).__name__))
        elif not all(tensor in kept for tensor in tensors):
            strip(child, kept, f"{prefix}{name}.")
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    own = {**dict(parameters), **dict(module.named_buffers(recurse=False, remove_duplicate=False))}
    cleared = [name for name, tensor in own.items() if id(tensor) not in kept]
    for name in cleared:
        setattr(module, name, None)  # the name stays, with nothing under it
    if cleared:
        module.register_load_state_dict_pre_hook(partial(_skip, tuple(cleared)))


def _skip(cleared: tuple[str, ...], module: Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let the state of the whole model be loaded: it holds what other ranks have."""
    for name in cleared:
        state_dict.pop(f"{prefix}{name}", None)
