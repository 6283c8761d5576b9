# SPDX-License-Identifier: Apache-2.0
"""Who holds which parameter: every one has a rank, and some have several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module

from fabric.strategies.pipelining.stages import Stage


@dataclass(frozen=True)
class Shared:
    """A parameter that stages on several ranks use, such as an embedding tied to the head.

    Args:
        parameter: The parameter, of which each of these ranks has its own copy.
        ranks: The ranks in the pipeline that hold it, in order.
    """

    parameter: Tensor
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Division:
    """The tensors of a model, divided over the ranks of a pipeline.

    Args:
        kept: The ids of the parameters and buffers that this rank holds.
        shared: The parameters that several ranks hold, the same list on all ranks.
    """

    kept: frozenset[int]
    shared: tuple[Shared, ...]


def divide_tensors(module: Module, stages: Sequence[Stage], ranks: Sequence[int], rank: int) -> Division:
    """Find out who holds what.

    Args:
        module: The user's model, whole.
        stages: Its stages.
        ranks: For each stage its rank in the pipeline.
        rank: This rank.

    Raises:
        ValueError: If a parameter is in no stage, or a stage holds nothing.
    """
    holders: dict[int, set[int]] = {}
    for stage, holder in zip(stages, ranks, strict=True):
        for tensor in stage.tensors:
            holders.setdefault(id(tensor), set()).add(holder)
    _validate(module, stages, holders)
    for buffer in module.buffers():
        holders.setdefault(id(buffer), {ranks[0]})  # read by no stage, yet a part of the model's state
    shared = [
        Shared(parameter, tuple(sorted(holders[id(parameter)])))
        for parameter in module.parameters()
        if len(holders[id(parameter)]) > 1
    ]
    return Division(frozenset(tensor for tensor, held_by in holders.items() if rank in held_by), tuple(shared))


def _validate(module: Module, stages: Sequence[Stage], holders: dict[int, set[int]]) -> None:
    homeless = [name for name, parameter in module.named_parameters() if id(parameter) not in holders]
    if homeless:
        raise ValueError(
            f"`PipelineParallelStrategy`: {len(homeless)} parameters of `{type(module).__name__}` are in no stage, the"
            f" first is `{homeless[0]}`, so no rank would hold them. Use them in a stage, or take them out of the model"
            " before `fabric.setup(...)`."
        )
    for index, stage in enumerate(stages):
        if not stage.names:
            raise ValueError(
                f"`PipelineParallelStrategy`: stage {index} of `{type(module).__name__}` has no module in it."
                " Give each stage something to do."
            )
