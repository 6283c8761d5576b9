# SPDX-License-Identifier: Apache-2.0
"""Saving weights as `safetensors`, as Hugging Face writes them, and everything else beside them."""

import io
import os
import re
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from torch import Tensor
from torch.nn import Module

from fabric.checkpoint.access import Attempts, Ranks, StateAccess
from fabric.checkpoint.copies import Copies, is_apart
from fabric.checkpoint.files.safetensors_file import DTYPES, in_file_order, write_safetensors
from fabric.checkpoint.files.sums import MARK
from fabric.checkpoint.files.swap import remove_hidden, swap
from fabric.checkpoint.files.torch_file import write_torch_file
from fabric.checkpoint.state.flatten import key_of
from fabric.checkpoint.state.later import Later, is_rows, replaced
from fabric.checkpoint.state.tree import is_stateful
from fabric.checkpoint.state.union import united
from fabric.checkpoint.weights.pieces import Pieces
from fabric.checkpoint.weights.places import (
    SUFFIX,
    NewNames,
    Place,
    may_be_complete,
    new_names,
    place_of,
    remove_file,
    remove_object,
    remove_others,
)
from fabric.plugins.io.whole_file import os_errors_name, replacing_file
from fabric.utilities.cloud_io import local_path
from fabric.utilities.parameter_names import plain_name
from fabric.utilities.types import PathLike

DEFAULT_SHARD_SIZE = "5GB"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
Named = list[tuple[str, Later]]


@dataclass(frozen=True)
class Parts:
    """A content in two.

    Args:
        weights: By name.
        ties: Names that are another one's.
        rest: The content without the weights, and how they belong to it; None where there is nothing else.
    """

    weights: Named
    ties: Mapping[str, str]
    rest: dict[str, Any] | None


@dataclass(frozen=True)
class Plan:
    """What is to be written, and in what order.

    Args:
        parts: What it consists of.
        shards: The weights of each file.
        pieces: Brings what is sharded.
    """

    parts: Parts
    shards: list[Named]
    pieces: Pieces


def plan_weights(
    path: PathLike,
    content: Any,
    state: Any,
    access: StateAccess,
    attempts: Attempts,
    max_shard_size: int | str | None = None,
    copies: Copies | None = None,
) -> Plan:
    """Divide a content into weights and the rest. Collective.

    Args:
        path: A folder, or a file that ends in `.safetensors`; the same on all ranks.
        content: The states.
        state: What they were taken from.
        access: The strategy.
        attempts: Where errors are kept; all ranks raise the first one.
        max_shard_size: The most bytes of one file of weights in a folder, as a number or as `5GB`.
        copies: Makes a copy, so that the loop may go on before it is written: each rank copies its shards, and rank 0
            all else.
    """
    if access.state_is_distributed:
        content = united(content, state, access, attempts)
    plan = Plan(Parts([], {}, None), [], Pieces())
    with attempts:
        largest = _largest(path, max_shard_size)
        if access.is_global_zero or not access.state_is_distributed:
            if copies is not None:
                content = copies.of(content) if access.is_global_zero else copies.of_shards(content)
            parts = _divide(content, state, plan.pieces)
            plan = Plan(parts, in_shards(parts.weights, largest), plan.pieces)
            plan.pieces.expect([[tensor for _, tensor in shard] for shard in plan.shards])
            plan.pieces.expect(parts.rest)
    attempts.agree(access)
    return plan


def save_weights(path: PathLike, plan: Plan, checksum: bool, ranks: Ranks, attempts: Attempts) -> None:
    """Write the states of modules as `safetensors`, and the rest of a content beside them. Collective.

    Rank 0 writes; it holds one whole tensor of those that are sharded at a time.

    Args:
        path: The one of the plan.
        plan: What `plan_weights` gave.
        checksum: Whether readers shall check sums.
        ranks: How to reach the other ranks; not those of the loop, where it goes on.
        attempts: Where errors are kept; all ranks raise the first one.
    """
    with attempts:
        plan.pieces.meet(ranks)
    attempts.agree(ranks)
    with attempts:
        if ranks.is_global_zero:
            write_weights(path, plan.shards, plan.parts.ties, plan.parts.rest, checksum)
    plan.pieces.drain(attempts)
    attempts.agree(ranks)


def _largest(path: PathLike, max_shard_size: int | str | None) -> float:
    """The most bytes of a file."""
    if os.fspath(path).endswith(SUFFIX):
        if max_shard_size is not None:
            raise ValueError(
                f"`fabric.save({os.fspath(path)!r}, ..., max_shard_size={max_shard_size!r})`: this is one file. Give a"
                " folder with `format='safetensors'` for several."
            )
        return float("inf")
    return parsed_size(DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size)


def parsed_size(size: int | str) -> int:
    """A number of bytes: `5GB`, `500 MiB`, `1000`."""
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    number = 0.0
    if match:
        number = float(match[1]) * (1024 if match[3] else 1000) ** (
            "KMGT".index(match[2].upper()) + 1 if match[2] else 0
        )
    elif isinstance(size, int) and not isinstance(size, bool):
        number = size
    if number < 1:
        raise ValueError(f"`max_shard_size={size!r}` is no size. Write a number of bytes, or one as in `'5GB'`.")
    return int(number)


def in_shards(weights: Named, largest: float) -> list[Named]:
    """Weights by file: in their order, as many as fit, in each file as it is written; one alone may be larger."""
    shards: list[Named] = [[]]
    size = 0
    for name, tensor in weights:
        if shards[-1] and size + tensor.nbytes > largest:
            shards.append([])
            size = 0
        shards[-1].append((name, tensor))
        size += tensor.nbytes
    return [in_file_order(shard) for shard in shards]


def _divide(content: Any, state: Any, pieces: Pieces) -> Parts:
    found: list[tuple[tuple[Any, ...], Module, Mapping[str, Any]]] = []
    rest = _without_modules(content, state, (), found)
    if not found:
        raise ValueError(
            "`fabric.save(..., format='safetensors')`: `state` holds no module whose weights could be written. Write"
            " `{'model': model, ...}`, or leave `format` out."
        )
    weights: Named = []
    ties: dict[str, str] = {}
    notes = []
    for path, module, values in found:
        prefix = f"{key_of(path)}." if len(found) > 1 else ""
        own = _ties(module, values)
        ties |= {prefix + name: prefix + kept for name, kept in own.items()}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor | Later)}
        others = {name: value for name, value in values.items() if name not in tensors}
        _validate_weights(tensors)
        weights += [(prefix + name, pieces.later(value)) for name, value in tensors.items() if name not in own]
        notes.append(note(path, prefix, list(values), others, getattr(values, "_metadata", None)))
    names = [name for name, _ in weights]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`fabric.save`: two weights would have the name `{twice}`. Rename a module in `state`.")
    content = replaced(rest, lambda tensor: pieces.later(tensor) if is_apart(tensor) else tensor)
    return Parts(weights, ties, {"fabric": 1, "state": content, "modules": notes})


def note(path: tuple[Any, ...], prefix: str, names: list[str], others: Mapping[str, Any], versions: Any) -> Any:
    """How weights belong to a content.

    Args:
        path: The keys to the module's state.
        prefix: What its names begin with among the weights.
        names: All of its names, in order, without that.
        others: What of it are no weights.
        versions: Those of its modules, as PyTorch keeps them beside a state dictionary.
    """
    kept = {key: dict(value) for key, value in (versions or {}).items()}
    return {"path": list(path), "prefix": prefix, "names": names, "others": dict(others), "versions": kept}


def _without_modules(value: Any, state: Any, path: tuple[Any, ...], found: list[Any]) -> Any:
    """The content with nothing in the place of each module's state; those are added to `found`."""
    if isinstance(state, Module) and isinstance(value, Mapping):
        found.append((path, state, value))
        return None
    if is_stateful(state):
        return value
    if isinstance(state, Mapping):
        entries = {key: _without_modules(item, state[key], (*path, key), found) for key, item in value.items()}
        return OrderedDict(entries) if isinstance(value, OrderedDict) else entries
    if type(state) in (list, tuple):
        items = enumerate(zip(value, state, strict=True))
        return type(value)(_without_modules(item, origin, (*path, index), found) for index, (item, origin) in items)
    return value


def _ties(module: Module, values: Mapping[str, Any]) -> dict[str, str]:
    """Names of a state that are second names of one parameter or buffer, and the first names."""
    firsts: dict[int, str] = {}
    ties: dict[str, str] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        plain = plain_name(name)
        if plain in values:
            first = firsts.setdefault(id(tensor), plain)
            if first != plain:
                ties[plain] = first
    return ties


def _validate_weights(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not is_rows(tensor) or tensor.dtype not in DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"`fabric.save(..., format='safetensors')`: `{name}` is a `{type(tensor).__name__}` of {kind}"
                f" ({str(tensor.layout).removeprefix('torch.')}), which safetensors has no form for."
                " Leave out `format`, or the tensor with `filter`."
            )


def write_weights(
    path: PathLike, shards: list[Named], ties: Mapping[str, str], rest: Any, checksum: bool = False
) -> None:
    """Write the files of a checkpoint, and last the one that makes it complete. Runs on one rank.

    Args:
        path: A folder, or a file that ends in `.safetensors`.
        shards: The weights of each file, as `in_shards` gives them.
        ties: Names that are another one's.
        rest: What `Parts` says; it may hold `Later` too, which are read after the weights.
        checksum: Whether readers shall check sums.
    """
    with os_errors_name(path), _target(path) as place:
        names = new_names(place, len(shards))
        try:
            (_write_one if len(shards) == 1 else _write_several)(place, names, shards, ties, rest, checksum)
        except BaseException:
            if not may_be_complete(place, names):
                for name in {*names.files, names.rest} - {names.marker}:
                    remove_file(place.at(name))
            raise
        remove_others(place, {*names.files, names.marker, *([names.rest] if rest is not None else [])})


def _write_one(
    place: Place, names: NewNames, shards: list[Named], ties: Mapping[str, str], rest: Any, checksum: bool
) -> None:
    """The file of the weights takes its place when the rest is there."""
    metadata = {"format": "pt", **names.metadata(has_rest=rest is not None), **ties}
    with replacing_file(place.at(names.marker), {}) as file:
        _write_file(place, shards[0], metadata, file, checksum)
        if rest is not None:
            write_torch_file(rest, place.at(names.rest), MARK if checksum else b"")


def _write_several(
    place: Place, names: NewNames, shards: list[Named], ties: Mapping[str, str], rest: Any, checksum: bool
) -> None:
    metadata = {"format": "pt", **names.metadata(has_rest=False)}
    for name, shard in zip(names.files, shards, strict=True):
        with replacing_file(place.at(name), {}) as file:
            _write_file(place, shard, metadata, file, checksum)
    if rest is not None:
        write_torch_file(rest, place.at(names.rest), MARK if checksum else b"")
    sizes = [[(name, tensor.nbytes) for name, tensor in shard] for shard in shards]
    with replacing_file(place.at(names.marker), {}) as file:
        file.write(names.index(sizes, ties, has_rest=rest is not None, checksum=checksum))


def _write_file(place: Place, shard: Named, metadata: Mapping[str, str], file: IO[bytes], checksum: bool) -> None:
    if not checksum or local_path(place.folder) is not None:
        write_safetensors(shard, metadata, file, checksum)
        return
    whole = io.BytesIO()  # the sums stand at its beginning, and what was sent can't be changed
    write_safetensors(shard, metadata, whole, checksum)
    file.write(whole.getbuffer())


@contextmanager
def _target(path: PathLike) -> Iterator[Place]:
    """Where to write. Beside the path, where a file stands at that of a folder: it goes when the folder is complete."""
    place = place_of(path)
    local = local_path(place.folder)
    if local is None or os.fspath(path).endswith(SUFFIX):
        yield place
        if not place.marker:
            remove_object(place.folder)
        return
    folder = os.path.realpath(local)
    beside = None
    if os.path.isfile(folder):
        parent, name = os.path.split(folder)
        beside = os.path.join(parent, f".{name[:60]}.{uuid.uuid4().hex[:8]}.tmp")
    is_new = beside is not None or not os.path.isdir(folder)
    os.makedirs(beside or folder, exist_ok=True)
    try:
        yield Place(beside or folder, place.stem)
        swap(beside, folder) if beside is not None else remove_hidden(folder)
    except BaseException:
        if is_new:
            with suppress(OSError):
                os.rmdir(beside or folder)
        raise
