# SPDX-License-Identifier: Apache-2.0
"""How the parts of all ranks come together."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fabric.checkpoint import Attempts
from fabric.evaluation.part import CALL, Form, Part
from fabric.strategies import Strategy
from fabric.strategies.padding import validate_pad_value


@dataclass(frozen=True)
class Layout:
    """Who has how many samples.

    Args:
        processes: For each data-parallel rank the process that speaks for it; all of a tensor group have the same data.
        valid: For each data-parallel rank the number of real samples.
        world_size: Number of processes.
        shapes: For each tensor the shape that it has on all ranks after padding.
        in_turn: Whether the result takes one sample of each rank in turn.
    """

    processes: tuple[int, ...]
    valid: tuple[int, ...]
    world_size: int
    shapes: tuple[tuple[int, ...], ...]
    in_turn: bool

    @property
    def most(self) -> int:
        """The first size of the padded parts."""
        return max(self.valid)

    @property
    def is_plain(self) -> bool:
        """Whether the parts of all processes, one after the other, are the result."""
        whole = len(self.processes) == self.world_size and min(self.valid) == self.most
        return whole and self.processes == tuple(range(self.world_size)) and not self.in_turn

    @cached_property
    def places(self) -> Tensor:
        """Where the samples of the result stand in the padded parts of all processes, one after the other."""
        samples = torch.arange(self.most)
        index = torch.tensor(self.processes)[:, None] * self.most + samples
        real = samples < torch.tensor(self.valid)[:, None]
        return index.T[real.T] if self.in_turn else index[real]


def agree_on_layout(
    part: Part, attempts: Attempts, strategy: Strategy, *, in_order: bool, pad_value: float | None
) -> Layout:
    """Exchange what fits into four numbers, and more only where something is wrong or has to be padded.

    Args:
        part: What this rank has.
        attempts: Whether it could be told.
        strategy: Carries the exchange.
        in_order: Whether the result is in the order of the data.
        pad_value: What fills up where ranks differ.
    """
    arguments = {"in_order": in_order, "pad_value": pad_value, "interleaved": part.interleaved}
    digest = _digest(repr((part.forms, arguments)))
    own = [int(attempts.error is not None), digest, part.valid, part.rank]
    ranks = strategy.gather_alike(torch.tensor(own, dtype=torch.int64, device=strategy.root_device)).tolist()
    forms = part.forms
    if any(failed or other != digest for failed, other, *_ in ranks):
        attempts.agree(strategy)
        forms = _padded_forms(strategy.gather_objects((part.forms, arguments)), pad_value)
    speakers = {rank: process for process, (*_, rank) in reversed(list(enumerate(ranks)))}
    processes = tuple(speakers[rank] for rank in sorted(speakers))
    valid = tuple(ranks[process][2] for process in processes)
    shapes = tuple((max(valid), *form.sizes) for form in forms if form.kind != "list")
    return Layout(processes, valid, len(ranks), shapes, in_order and part.interleaved)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _padded_forms(
    ranks: Sequence[tuple[tuple[Form, ...], dict[str, Any]]], pad_value: float | None
) -> tuple[Form, ...]:
    """The values with the largest sizes of all ranks, where these are the only difference and may be filled up."""
    if any(arguments != ranks[0][1] for _, arguments in ranks):
        listed = "; ".join(f"rank {n}: {arguments}" for n, (_, arguments) in enumerate(ranks))
        raise ValueError(f"{CALL} needs the same loader and arguments on all ranks, but got {listed}.")
    columns = list(zip(*(forms for forms, _ in ranks), strict=False))
    alike = len({len(forms) for forms, _ in ranks}) == 1 and all(map(_differ_in_sizes_only, columns))
    if not alike or pad_value is None:
        listed = "; ".join(f"rank {n}: {', '.join(map(str, forms))}" for n, (forms, _) in enumerate(ranks))
        hint = "Pad them to the same shape first, or pass `pad_value=`." if alike else "Make them alike."
        raise ValueError(
            f"{CALL} needs the same values, dtypes and dimensions (but for the first) on all ranks, but got {listed}."
            f" {hint}"
        )
    return tuple(_largest(column, pad_value) for column in columns)


def _differ_in_sizes_only(forms: Sequence[Form]) -> bool:
    return len({(form.name, form.kind, len(form.sizes)) for form in forms}) == 1


def _largest(forms: Sequence[Form], pad_value: float) -> Form:
    first = forms[0]
    if any(form != first for form in forms):
        validate_pad_value("gather_for_metrics", getattr(torch, first.kind), pad_value)
    sizes = zip(*(form.sizes for form in forms), strict=True)
    return Form(first.name, first.kind, tuple(max(of_ranks) for of_ranks in sizes))
