# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a nested batch have the sequence, and along which dimension."""

from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fabric.utilities.apply_func import apply_to_tensors

CALL = "`fabric.context_parallel(tensors, seq_dims)`"


@dataclass(frozen=True)
class Sequenced:
    """A tensor of the batch.

    Args:
        name: How one writes it, such as `tensors[0]`.
        tensor: The tensor, whole.
        dim: The dimension of the sequence, counted from 0; None for a tensor that each rank gets whole.
    """

    name: str
    tensor: Tensor
    dim: int | None

    @property
    def length(self) -> int:
        """Tokens of the whole sequence; 0 for a tensor that has none."""
        return 0 if self.dim is None else self.tensor.size(self.dim)


def find_sequences(tensors: Any, seq_dims: Any, ranks: int) -> list[Sequenced]:
    """The tensors in their order, checked.

    Args:
        tensors: A tensor or any nesting of containers.
        seq_dims: The dimension of the sequence: one for all tensors, or the same nesting of them; None for none.
        ranks: How many share the sequence.

    Raises:
        TypeError: If the two are not nested alike, or a dimension is no integer.
        ValueError: If a tensor has no such dimension, or the lengths differ or can't be divided.
    """
    found = list(_pairs("tensors", tensors, seq_dims))
    sequences = [each for each in found if each.dim is not None]
    if not sequences:
        raise ValueError(f"{CALL}: there is no tensor with a sequence dimension in `tensors`, so nothing to divide.")
    first = sequences[0]
    for each in sequences[1:]:
        if each.length != first.length:
            raise ValueError(
                f"{CALL} divides one sequence, but `{first.name}` has {first.length} tokens along dimension"
                f" {first.dim} and `{each.name}` has {each.length} along dimension {each.dim}. Cut tables to the"
                " length of the batch first, and give a second sequence a block of its own, after this one."
            )
    rest = first.length % ranks
    if rest or not first.length:
        raise ValueError(
            f"{CALL}: the {first.length} tokens of `{first.name}` (dimension {first.dim}) can't be divided evenly by"
            f" `context_parallel_size={ranks}`. Pad the batch to {first.length - rest + ranks} tokens"
            + (f", or cut it to {first.length - rest}." if first.length > ranks else ".")
        )
    return found


def replace(tensors: Any, by: Callable[[Sequenced], Tensor], found: list[Sequenced]) -> Any:
    """The same nesting with other tensors in it; the user's own containers are left as they are."""
    new: Iterator[Tensor] = map(by, found)
    return apply_to_tensors(tensors, lambda _: next(new))


def _pairs(name: str, value: Any, dims: Any) -> Iterator[Sequenced]:
    """Each tensor with its dimension, in the order of `apply_to_tensors`."""
    for_all = dims is None or (isinstance(dims, int) and not isinstance(dims, bool))
    keys = _keys(value)
    if for_all and keys is None:
        leaves: list[Tensor] = []
        apply_to_tensors(value, leaves.append)  # one, none, or those of a dataclass
        yield from (Sequenced(name, tensor, _validated_dim(name, tensor, dims)) for tensor in leaves)
        return
    if not for_all and (keys is None or not _match(value, dims)):
        raise TypeError(
            f"{CALL}: {_describe(value)} at `{name}` and `{dims!r}` do not match. Give one dimension for all tensors,"
            " or one for each, nested as the tensors are; None leaves a tensor whole."
        )
    for key in keys or ():
        yield from _pairs(f"{name}[{key!r}]", value[key], dims if for_all else dims[key])


def _match(value: Any, dims: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(dims, Mapping) and value.keys() == dims.keys()
    return isinstance(dims, list | tuple) and len(value) == len(dims)


def _keys(value: Any) -> list[Any] | None:
    """What to index a container with to get at its items in turn; None for everything else."""
    if isinstance(value, Mapping):
        return list(value)
    return list(range(len(value))) if isinstance(value, list | tuple | UserList | deque) else None


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return "the tensor"
    if isinstance(value, Mapping):
        return f"the `{type(value).__name__}` with the keys {list(value)}"
    length = "" if _keys(value) is None else f" of {len(value)} items"
    return f"the `{type(value).__name__}`{length}"


def _validated_dim(name: str, tensor: Tensor, dim: int | None) -> int | None:
    if dim is None:
        return None
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{CALL}: `{name}` has the shape {tuple(tensor.shape)}, and so no dimension {dim}."
            " Name the dimension of its sequence, or None to leave it whole."
        )
    return dim % tensor.dim()
