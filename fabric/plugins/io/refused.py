# SPDX-License-Identifier: Apache-2.0
"""Which key of a file holds an object that safe loading refuses; found out without running anything in the file."""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from fabric.plugins.io.contents import validate_pickle


class Refused(NamedTuple):
    """An object that safe loading refuses.

    Args:
        key: Where it is, such as `["args"]["optimizer"]`.
        type: The full name of the class or function that its pickle asks for.
    """

    key: str
    type: str


def find_refused(source: Any) -> Refused | None:
    """The first object in a `torch.save` file that `weights_only=True` refuses; None where there is none to be found.

    Args:
        source: A local path, or a binary file that can seek.
    """
    try:
        rewind(source)
        unsafe = frozenset(torch.serialization.get_unsafe_globals_in_checkpoint(source))
        if not unsafe:
            return None
        content = _load_inert(source)
        for key, origin in _walk(content, ""):
            if origin in unsafe:
                return Refused(key or "(the whole file)", origin)
    except Exception:  # damaged in some way: then the file as a whole is the news, and not one object in it
        return None
    return Refused("(not found)", min(unsafe))


def rewind(source: Any) -> None:
    """Back to the start of an open file; a path needs nothing."""
    if hasattr(source, "seek"):
        source.seek(0)


class _Inert:
    """Stands for whatever a pickle names: takes everything and does nothing."""

    origin = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Inert":
        inert = super().__new__(cls)
        inert.parts = [args, kwargs]
        return inert

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.parts: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append({key: value})

    def append(self, value: Any) -> None:
        self.parts.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self.parts.extend(values)

    add = append


class _InertUnpickler(pickle.Unpickler):
    """Builds the structure of a pickle. No name in it is ever looked up, so nothing in it can run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (_Inert,), {"origin": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        """The data of a tensor is of no interest."""


class _RecordUnpickler(_InertUnpickler):
    """Shows also which memory a tensor is in."""

    PREFIX = "the record "

    def persistent_load(self, pid: Any) -> Any:
        return type("_Record", (_Inert,), {"origin": f"{self.PREFIX}{pid[2]}"})()


def _load_inert(source: Any, unpickler: type[_InertUnpickler] = _InertUnpickler) -> Any:
    rewind(source)
    with zipfile.ZipFile(source) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        data = archive.read(name)
    validate_pickle(data)
    return unpickler(io.BytesIO(data)).load()


def _walk(value: Any, key: str, seen: set[int] | None = None) -> Iterator[tuple[str, str]]:
    """The key and origin of everything that stands for a name, from the outside in; of what recurs the first time."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, _Inert) or (isinstance(value, type) and issubclass(value, _Inert)):
        yield key, value.origin
    for inner_key, item in _items(value, key):
        yield from _walk(item, inner_key, seen)


def _items(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _Inert):
        yield from ((key, part) for part in value.parts)
    elif isinstance(value, dict):
        yield from ((key, name) for name in value)
        yield from (
            (f'{key}["{name}"]' if isinstance(name, str) else f"{key}[{name!r}]", value[name]) for name in value
        )
    elif isinstance(value, list | tuple):
        yield from ((f"{key}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, set):
        yield from ((key, item) for item in value)


def key_of_record(source: Any, record: str) -> str | None:
    """The key of a tensor in a `torch.save` file, such as `["model"]["weight"]`; None where it can't be found.

    Args:
        source: A binary file that can seek.
        record: The name in the archive of the memory that the tensor is in, such as `archive/data/3`.
    """
    number = record.rpartition("/")[2]
    try:
        content = _load_inert(source, _RecordUnpickler)
    except Exception:  # damaged in other ways too
        return None
    origin = f"{_RecordUnpickler.PREFIX}{number}"
    return next((key for key, value in _leaves(content, "") if origin in _origins(value)), None)


def _origins(value: Any) -> set[str]:
    return {origin for _, origin in _walk(value, "")}


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """What is in nested containers, by key; a tensor is one thing."""
    if isinstance(value, dict | list | tuple):
        for inner_key, item in _items(value, key):
            yield from _leaves(item, inner_key)
    else:
        yield key, value
