# SPDX-License-Identifier: Apache-2.0
"""`fabric.summary`: what a model is made of, and the memory that its parameters take on this device."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from fabric.utilities.parameter_names import plain_name


@dataclass(frozen=True)
class Row:
    """A module with all that is below it. What it shares with another module is counted in both rows.

    Attributes:
        name: Its name; empty for the model itself.
        kind: Its class.
        parameters: Number of parameters, of all ranks together where they are sharded.
        trainable: How many of them are trained.
        dtypes: Of its parameters, by name.
        devices: Of its parameters, by name.
        memory: Bytes of its parameters on this rank.
    """

    name: str
    kind: str
    parameters: int
    trainable: int
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    memory: int


@dataclass(frozen=True)
class Summary:
    """What `fabric.summary` returns; as text it is a table.

    Attributes:
        rows: The modules down to the depth asked for; the first one is the model.
        parameters: Number of parameters, each counted once, of all ranks together where they are sharded.
        trainable: How many of them are trained.
        parameter_memory: Bytes of the parameters on this rank.
        buffer_memory: Bytes of the buffers on this rank.
        gradient_memory: Bytes of their gradients, once there are some.
        optimizer_memory: Bytes of the optimizer's state, as estimated from its values per parameter.
        tied: Name of each parameter that is another one's, and the name of that one.
        on_meta: Names of the parameters without storage yet.
        lazy: Names of the parameters that get their shape in the first forward; they count as nothing.
        sharded: Whether this rank holds a part of the parameters only.
        ranks: Number of ranks that hold the model, or a part of it.
    """

    rows: tuple[Row, ...]
    parameters: int
    trainable: int
    parameter_memory: int
    buffer_memory: int
    gradient_memory: int
    optimizer_memory: int
    tied: dict[str, str]
    on_meta: tuple[str, ...]
    lazy: tuple[str, ...]
    sharded: bool
    ranks: int

    @property
    def memory(self) -> int:
        """Bytes on this rank: parameters, buffers, gradients and the optimizer's state."""
        return self.parameter_memory + self.buffer_memory + self.gradient_memory + self.optimizer_memory

    def __str__(self) -> str:
        head = ("module", "type", "parameters", "trainable", "dtype", "device", "memory")
        cells = [
            (
                row.name or "(model)",
                row.kind,
                f"{row.parameters:,}",
                f"{row.trainable:,}",
                ", ".join(row.dtypes),
                ", ".join(row.devices),
                _size(row.memory),
            )
            for row in self.rows
        ]
        return "\n".join([*_table([head, *cells]), "", *self._totals(), *self._notes()])

    def _totals(self) -> Iterator[str]:
        frozen = self.parameters - self.trainable
        yield f"{self.parameters:,} parameters: {self.trainable:,} trainable, {frozen:,} frozen"
        each = "its own part" if self.sharded else "a full copy"
        where = f"On each of {self.ranks} ranks ({each})" if self.ranks > 1 else "On this device"
        yield (
            f"{where}: {_size(self.memory)} = parameters {_size(self.parameter_memory)}"
            f" + buffers {_size(self.buffer_memory)} + gradients {_size(self.gradient_memory)}"
            f" + optimizer {_size(self.optimizer_memory)} (estimated)"
        )

    def _notes(self) -> Iterator[str]:
        for name, first in self.tied.items():
            yield f"`{name}` is `{first}`: tied, counted once."
        if self.on_meta:
            yield f"On the meta device, without memory yet: {_listed(self.on_meta)}."
        if self.lazy:
            yield f"Not initialised before the first forward, and not counted: {_listed(self.lazy)}."


def summarize(model: Module, *, depth: int, ranks: int, optimizer_values: int) -> Summary:
    """Look at a model; nothing is moved, computed or sent.

    Args:
        model: A plain module.
        depth: Levels of modules below the model that get a row; -1 for all.
        ranks: Number of ranks that hold the model, or a part of it.
        optimizer_values: Values that the optimizer keeps for each trained parameter.

    Raises:
        ValueError: For a depth below -1, or a negative number of values.
    """
    _validate(depth, optimizer_values)
    names, tied = _names(model)
    lazy = [parameter for parameter in names if is_lazy(parameter)]
    known = [parameter for parameter in names if not is_lazy(parameter)]
    trained = [parameter for parameter in known if parameter.requires_grad]
    buffers = {id(buffer): buffer for buffer in model.buffers() if not is_lazy(buffer)}
    gradients = sum(map(_memory, trained))
    return Summary(
        rows=tuple(_rows(model, depth)),
        parameters=_count(known),
        trainable=_count(trained),
        parameter_memory=sum(map(_memory, known)),
        buffer_memory=sum(map(_memory, buffers.values())),
        gradient_memory=gradients,
        optimizer_memory=gradients * optimizer_values,
        tied=tied,
        on_meta=tuple(names[parameter] for parameter in known if parameter.is_meta),
        lazy=tuple(names[parameter] for parameter in lazy),
        sharded=any(_local(parameter) is not parameter for parameter in known),
        ranks=ranks,
    )


def _validate(depth: int, optimizer_values: int) -> None:
    if depth < -1:
        raise ValueError(f"`fabric.summary(depth={depth})` is too small. Write 0 or more, or -1 for all levels.")
    if optimizer_values < 0:
        raise ValueError(
            f"`fabric.summary(optimizer_values={optimizer_values})` is negative. Write 2 for Adam, 1 for SGD with"
            " momentum, 0 for SGD without."
        )


def _names(model: Module) -> tuple[dict[Parameter, str], dict[str, str]]:
    """The first name of each parameter; and of each further name the first one."""
    names: dict[Parameter, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, plain_name(name))
        if first != plain_name(name):
            tied[plain_name(name)] = first
    return names, tied


def _rows(model: Module, depth: int) -> Iterator[Row]:
    for name, module in model.named_modules():
        name = plain_name(name)
        level = name.count(".") + 1 if name else 0
        if depth == -1 or level <= depth:
            yield _row(name, module)


def _row(name: str, module: Module) -> Row:
    parameters = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
    return Row(
        name=name,
        kind=type(module).__name__,
        parameters=_count(parameters),
        trainable=_count(parameter for parameter in parameters if parameter.requires_grad),
        dtypes=_distinct(str(parameter.dtype).removeprefix("torch.") for parameter in parameters),
        devices=_distinct(str(parameter.device) for parameter in parameters),
        memory=sum(map(_memory, parameters)),
    )


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _memory(tensor: Tensor) -> int:
    """Bytes on this rank. On the meta device: those that it will take."""
    local = _local(tensor)
    return local.numel() * local.element_size()


def _local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; any other tensor itself."""
    if type(tensor) in (Tensor, Parameter):
        return tensor
    if not torch.distributed.is_available():
        return tensor
    from torch.distributed.tensor import DTensor  # imported when first used: see design "Light"

    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = (False, False, True, True, False, False, True)
    for row in rows:
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more
