# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of the models that were set up, under their own names."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer


class Holdings:
    """Knows each parameter of the models that were set up, by identity: its name, and whether it is on this rank."""

    def __init__(self) -> None:
        # Held weakly, so that the memory of what other ranks hold is free as soon as the user lets go of it.
        self._known: dict[int, tuple[weakref.ref[Tensor], str, bool]] = {}
        self._elsewhere: set[int] = set()  # tied parameters that another rank counts

    def note(self, module: Module, kept: Collection[int]) -> None:
        """Remember the parameters of a model; `kept` are the ids of those that stay on this rank."""
        for name, parameter in module.named_parameters():
            self._known[id(parameter)] = (weakref.ref(parameter), name, id(parameter) in kept)

    def note_counted_elsewhere(self, parameters: Iterable[Tensor]) -> None:
        """Remember copies of tied parameters that count on another rank, where each counts once."""
        self._elsewhere.update(map(id, parameters))

    def keep_own(self, optimizer: Optimizer) -> None:
        """Take out of an optimizer, in place, what other ranks hold; groups stay, and may become empty.

        Raises:
            RuntimeError: If it has a parameter of no model that was set up.
        """
        for number, group in enumerate(optimizer.param_groups):
            here = [self._is_here(parameter, optimizer, number) for parameter in group["params"]]
            for entry in ("params", "param_names"):
                if entry in group:
                    group[entry] = [item for item, held in zip(group[entry], here, strict=True) if held]
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in list(optimizer.state):
            if id(parameter) not in own:
                del optimizer.state[parameter]

    def _is_here(self, parameter: Tensor, optimizer: Optimizer, number: int) -> bool:
        found = self._find(parameter)
        if found is None:
            raise RuntimeError(
                f"`{type(optimizer).__name__}` has a parameter of shape {list(parameter.shape)} in group {number} that"
                " belongs to no model that was set up, so it is not known which rank of the pipeline holds it. Set its"
                " model up before, or together: `fabric.setup(model, optimizer)`."
            )
        return found[1]

    def _find(self, parameter: Tensor) -> tuple[str, bool] | None:
        reference, name, held = self._known.get(id(parameter), (None, "", False))
        return (name, held) if reference is not None and reference() is parameter else None

    def names(self, optimizer: Optimizer) -> list[list[str]] | None:
        """The names of an optimizer's parameters, for each group; None if one is not known."""
        found = [[self._find(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if any(each is None for group in found for each in group):
            return None
        return [[each[0] for each in group if each is not None] for group in found]

    def counted(self, optimizer: Optimizer) -> list[Tensor]:
        """The optimizer's parameters on this rank, without tied ones that count on another one."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [parameter for parameter in parameters if id(parameter) not in self._elsewhere]


def adopt_rank_zero(module: Module, kept: Collection[int], strategy: Any) -> None:
    """Give the parameters and buffers that this rank keeps the values that they have on rank 0, one at a time.

    Args:
        module: The user's model, whole.
        kept: The ids of the tensors that stay on this rank.
        strategy: Knows the ranks and this rank's device.

    Raises:
        ValueError: If the ranks have unlike models.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = [f"`{name}` ({str(each.dtype).removeprefix('torch.')} {list(each.shape)})" for name, each in tensors.items()]
    _validate_alike(strategy.gather_objects(own))
    with torch.no_grad():
        for tensor in tensors.values():
            sent = tensor.detach().to(strategy.root_device).contiguous()
            dist.broadcast(sent, src=0)
            if id(tensor) in kept:
                tensor.copy_(sent)


def _validate_alike(models: list[list[str]]) -> None:
    for rank, other in enumerate(models):
        if other != models[0]:
            pairs = zip(models[0], other, strict=False)
            lengths = (f"{len(models[0])} parameters and buffers", f"{len(other)}")
            first, second = next((pair for pair in pairs if pair[0] != pair[1]), lengths)
            raise ValueError(
                f"`fabric.setup(...)`: rank 0 and rank {rank} have unlike models: {first} and {second}."
                " Make the same model on every rank."
            )
