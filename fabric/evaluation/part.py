# SPDX-License-Identifier: Apache-2.0
"""What one rank brings to a gather: its values, and how many of their samples are real."""

from dataclasses import dataclass
from typing import Any

from fabric.data import _FabricDataLoader
from fabric.data.share import Share
from fabric.evaluation.samples import values_by_sample
from fabric.strategies import Strategy

CALL = "`fabric.gather_for_metrics(data, loader)`"
_LENGTH = "samples (its first dimension, or its length)"


@dataclass(frozen=True)
class Form:
    """What can be told of a value without its samples.

    Args:
        name: How one writes it.
        kind: Its dtype, or `list`.
        sizes: Its dimensions after the first.
    """

    name: str
    kind: str
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        shape = "" if self.kind == "list" else f" [{', '.join(['batch', *map(str, self.sizes)])}]"
        return f"`{self.name}` {self.kind}{shape}"


@dataclass(frozen=True)
class Part:
    """What this rank has.

    Args:
        values: With one entry for each of `size` samples.
        forms: What each value is.
        size: Samples of its last batch.
        valid: So many of them, the first ones, are real.
        interleaved: Whether the ranks' samples take turns in the order of the data.
        rank: The data-parallel rank.
    """

    values: tuple[Any, ...] = ()
    forms: tuple[Form, ...] = ()
    size: int = 0
    valid: int = 0
    interleaved: bool = False
    rank: int = 0


def part_of_this_rank(data: Any, loader: Any, strategy: Strategy) -> Part:
    """Take the data apart, and compare it with the loader's last batch.

    Raises:
        TypeError: If the loader was not set up.
        RuntimeError: If it has not yielded a batch.
        ValueError: If the data does not have one value for each sample.
    """
    share = _share_of(loader)
    found = list(values_by_sample(data))
    if not found:
        raise ValueError(f"{CALL}: there is nothing to gather in `data`, which is of type `{type(data).__name__}`.")
    size = len(found[0][1])
    if any(len(value) != size for _, value in found):
        listed = ", ".join(f"`{name}` has {len(value)}" for name, value in found)
        raise ValueError(
            f"{CALL} needs the same number of samples (the first dimension, or the length of a list) in each value,"
            f" but {listed}. Pass values whose first dimension is the batch."
        )
    _validate_size(found[0][0], size, share, loader)
    return Part(
        values=tuple(value for _, value in found),
        forms=tuple(_form(name, value) for name, value in found),
        size=size,
        valid=size if share.valid is None else share.valid,
        interleaved=share.interleaved,
        rank=strategy.distributed_sampler_kwargs["rank"],
    )


def _form(name: str, value: Any) -> Form:
    if isinstance(value, list | tuple):
        return Form(name, "list")
    return Form(name, str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))


def _share_of(loader: Any) -> Share:
    if not isinstance(loader, _FabricDataLoader):
        raise TypeError(
            f"{CALL} takes a loader that `fabric.setup_dataloaders(...)` returned, but got `{type(loader).__name__}`."
        )
    share: Share | None = loader.share
    if share is None:
        raise RuntimeError(
            f"{CALL} gathers what was made of the loader's last batch, and this loader has not yielded one yet."
            " Call it inside `for batch in loader:`, with the loader of that loop."
        )
    return share


def _validate_size(name: str, size: int, share: Share, loader: Any) -> None:
    most = getattr(loader, "batch_size", None)  # not every iterable has one
    if isinstance(most, int) and size > most:
        raise ValueError(
            f"{CALL}: `{name}` has {size} {_LENGTH}, and the loader's batches have at most {most}."
            " Pass values whose first dimension is the batch."
        )
    if share.valid is not None and size < share.valid:
        raise ValueError(
            f"{CALL}: `{name}` has {size} {_LENGTH}, and the loader's last batch has {share.valid}."
            " Pass one value for each sample of that batch."
        )
