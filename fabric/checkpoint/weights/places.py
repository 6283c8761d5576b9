# SPDX-License-Identifier: Apache-2.0
"""Where weights stand in a folder, as Hugging Face names the files, and which of the files count.

One file, `model.safetensors`, or several and `model.safetensors.index.json`, which says what is where. That one file or
the index is written last and replaced in one step: it is what makes the others the checkpoint, and in its metadata it
names the file that holds the rest, such as the optimizer's state. Each save takes names of its own for what it writes
before, so a kill at any moment leaves the old checkpoint or the new one, whole. The next save removes what was left.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fabric.checkpoint.files.safetensors_file import damaged_file, later_safetensors
from fabric.checkpoint.files.sums import KEYS, noted, sealed
from fabric.checkpoint.files.torch_file import open_file
from fabric.checkpoint.folder.marker import MARKER
from fabric.plugins.io.whole_file import remove_stale
from fabric.utilities.cloud_io import is_object_store, local_path, split_url
from fabric.utilities.types import PathLike

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_REST, _SAVE, _TIES = "fabric.rest", "fabric.save", "fabric.ties"
_OWN = re.compile(r"\.training-[0-9a-f]{8}\.pt|-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")
_SHARDED = re.compile(r"data-[0-9a-f]{8}|__\d+_\d+\.distcp")
_LONGEST_NUMBER = 20
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Place:
    """Where weights are.

    Args:
        folder: A local path or URL.
        stem: What the names of the files begin with.
        marker: The end of the name of the file that makes it complete; "" where any of the two will do, since the whole
            folder is meant.
    """

    folder: str
    stem: str = "model"
    marker: str = ""

    def at(self, name: str) -> str:
        """The path of a file in the folder."""
        return os.path.join(self.folder, name) if local_path(self.folder) is not None else f"{self.folder}/{name}"


@dataclass(frozen=True)
class Commit:
    """What a complete checkpoint consists of.

    Args:
        marker: The name of the file that makes it complete.
        files: The names of the files with weights; for each name the weights that it must hold, if the index says so.
        rest: The name of the file with everything else; None where there is none.
        ties: Weights that are another one's under a second name.
        number: Of the save, from 1; 0 if it was not written by `fabric.save`.
    """

    marker: str
    files: Mapping[str, frozenset[str]]
    rest: str | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    number: int = 0


def place_of(path: PathLike) -> Place:
    """The place that a path means: a folder, one file, or an index."""
    text = os.fspath(path)
    for suffix in (INDEX_SUFFIX, SUFFIX):
        if text.endswith(suffix):
            head, name = _divided(text)
            return Place(head, name.removesuffix(suffix), suffix)
    return Place(text.rstrip("/") or text)


def _divided(path: str) -> tuple[str, str]:
    if local_path(path) is not None:
        head, name = os.path.split(local_path(path) or path)
        return head or ".", name
    head, _, name = path.rpartition("/")
    return head, name


def names_in_folder(folder: str) -> set[str]:
    """The names of what a folder holds; none where there is no folder."""
    try:
        local = local_path(folder)
        if local is not None:
            return set(os.listdir(local))
        filesystem, inner = split_url(folder)
        return {entry.rstrip("/").rpartition("/")[2] for entry in filesystem.ls(inner, detail=False)}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def find_commit(place: Place) -> Commit | None:
    """The checkpoint at a place; None where none is complete.

    Raises:
        ValueError: If it is damaged.
    """
    names = names_in_folder(place.folder)
    found = []
    if place.stem + SUFFIX in names and place.marker != INDEX_SUFFIX:
        found.append(_read_single(place))
    if place.stem + INDEX_SUFFIX in names and place.marker != SUFFIX:
        found.append(_read_index(place, place.stem + INDEX_SUFFIX, names))
    return max(found, key=lambda commit: commit.number, default=None)


def _read_single(place: Place) -> Commit:
    name = place.stem + SUFFIX
    tensors, metadata = later_safetensors(place.at(name))
    ties = {other: kept for other, kept in metadata.items() if kept in tensors and other not in tensors}
    ties = {other: kept for other, kept in ties.items() if other not in ("format", _REST, _SAVE, *KEYS)}
    return Commit(name, {name: frozenset(tensors)}, metadata.get(_REST), ties, _number(metadata.get(_SAVE)))


def _read_index(place: Place, marker: str, names: set[str]) -> Commit:
    path = place.at(marker)
    files, metadata = read_index(path, names)
    ties, rest = metadata.get(_TIES), metadata.get(_REST)
    ties = {name: kept for name, kept in ties.items() if isinstance(kept, str)} if isinstance(ties, dict) else {}
    return Commit(marker, files, rest if isinstance(rest, str) else None, ties, _number(str(metadata.get(_SAVE))))


def read_index(path: str, names: set[str]) -> tuple[dict[str, frozenset[str]], dict[str, Any]]:
    """What an index says: for each file the names that it holds; and its metadata.

    Args:
        path: The index.
        names: What is in its folder.

    Raises:
        ValueError: If it is damaged, or a file that it names is missing.
    """
    with open_file(path) as file:
        text = file.read()
    files: dict[str, set[str]] = {}
    try:
        index = json.loads(text)
        metadata = dict(index.get("metadata") or {})
        for name, home in index["weight_map"].items():
            files.setdefault(home, set()).add(name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged_file(path, f"{type(error).__name__}: {error}") from error
    for home in files:
        if not isinstance(home, str) or "/" in home or os.sep in home:
            raise damaged_file(path, f"`{home}` is outside of the folder")
        if home not in names:
            raise damaged_file(path, f"`{home}` is missing")
    return {home: frozenset(own) for home, own in files.items()}, metadata


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < _LONGEST_NUMBER else 0


@dataclass(frozen=True)
class NewNames:
    """The names of the files of a save, none of which is in use.

    Args:
        stem: What they begin with.
        files: For each part of the weights.
        rest: For everything else.
        marker: The one to write last.
        number: Of the save.
    """

    stem: str
    files: tuple[str, ...]
    rest: str
    marker: str
    number: int

    def metadata(self, *, has_rest: bool) -> dict[str, str]:
        """What the file that is written last says of the others."""
        return {_SAVE: str(self.number), **({_REST: self.rest} if has_rest else {})}

    def index(
        self, shards: Iterable[Iterable[tuple[str, int]]], ties: Mapping[str, str], *, has_rest: bool, checksum: bool
    ) -> bytes:
        """The index of several files, in Hugging Face's form.

        Args:
            shards: For each file, the names and sizes in bytes of its weights.
            ties: Second names.
            has_rest: Whether there is more than weights.
            checksum: Whether readers shall check sums.
        """
        homes = {name: home for home, shard in zip(self.files, shards, strict=True) for name, _ in shard}
        total = sum(size for shard in shards for _, size in shard)
        metadata = {"total_size": total, **self.metadata(has_rest=has_rest), _TIES: dict(ties)}
        metadata |= noted([]) if checksum else {}
        text = json.dumps({"metadata": metadata, "weight_map": homes}, indent=2).encode() + b"\n"
        return sealed(text) if checksum else text


def new_names(place: Place, count: int) -> NewNames:
    """Names for the files of a save.

    Args:
        place: Where to.
        count: How many files the weights make.
    """
    names = names_in_folder(place.folder)
    before: Commit | None = None
    with suppress(ValueError):  # what is damaged is replaced
        before = find_commit(place)
    unique = uuid.uuid4().hex[:8]
    number = before.number + 1 if before else 1
    rest = f"{place.stem}.training-{unique}.pt"
    if count == 1:
        marker = place.stem + SUFFIX
        return NewNames(place.stem, (marker,), rest, marker, number)
    taken = any(name.startswith(place.stem) and name.endswith(SUFFIX) for name in names)
    stem = f"{place.stem}-{unique}" if taken else place.stem
    files = tuple(f"{stem}-{index:05}-of-{count:05}{SUFFIX}" for index in range(1, count + 1))
    return NewNames(place.stem, files, rest, place.stem + INDEX_SUFFIX, number)


def may_be_complete(place: Place, names: NewNames) -> bool:
    """Whether the marker of a save that failed is in its place: it may have been interrupted, or not heard of it."""
    try:
        commit = find_commit(Place(place.folder, place.stem, names.marker.removeprefix(place.stem)))
    except ValueError:
        return False  # the damaged one of an earlier save
    except Exception:  # who knows; the next save removes what is left
        return True
    return commit is not None and commit.number == names.number


def remove_others(place: Place, kept: Iterable[str]) -> None:
    """Remove what earlier saves, complete or killed, left at a place, once the new one is complete.

    Only files that `fabric.save` wrote and, in a folder, weights in place of which the new ones stand.
    """
    names = names_in_folder(place.folder) - set(kept)
    _remove_unfinished(place, names)
    if place.marker:
        own = re.compile(re.escape(place.stem) + r"\.training-[0-9a-f]{8}\.pt")
        _remove_all(place, filter(own.fullmatch, names - _rest_of_folder(place)))
        return
    was_sharded = MARKER in names
    if was_sharded:  # it stops to be a folder of that kind here
        remove_file(place.at(MARKER))
    tails = {name: name.removeprefix(place.stem) for name in names if name.startswith(place.stem)}
    _remove_all(place, [name for name, tail in tails.items() if tail == INDEX_SUFFIX])  # before what it refers to
    _remove_all(place, [name for name, tail in tails.items() if tail == SUFFIX or _is_left(place, name, tail)])
    if was_sharded:
        _remove_all(place, filter(_SHARDED.fullmatch, names))


def _remove_unfinished(place: Place, names: Iterable[str]) -> None:
    """Remove the temporary files of saves that were killed, and none that is still being written."""
    own = re.compile(
        re.escape(f".{place.stem}") + r"(-[0-9a-f]{8})?(\.training-[0-9a-f]{8}\.pt|-\d{5}-of-\d{5}\.safetensors|"
        r"\.safetensors(\.index\.json)?)\.[0-9a-f]{8}\.tmp"
    )
    folder = local_path(place.folder)
    for name in filter(own.fullmatch, names) if folder is not None else ():
        remove_stale(os.path.join(folder or "", name))


def _is_left(place: Place, name: str, tail: str) -> bool:
    return bool(_OWN.fullmatch(tail)) or (bool(_SHARD.fullmatch(tail)) and is_own(place, name))


def _rest_of_folder(place: Place) -> set[str | None]:
    """What belongs to the checkpoint of the whole folder, and not to the one file of that name."""
    with suppress(OSError, ValueError):
        commit = find_commit(Place(place.folder, place.stem, INDEX_SUFFIX))
        return {commit.rest} if commit else set()
    return set()


def _remove_all(place: Place, names: Iterable[str]) -> None:
    for name in names:
        remove_file(place.at(name))


def is_own(place: Place, name: str) -> bool:
    """Whether `fabric.save` wrote a file of weights."""
    try:
        return _SAVE in later_safetensors(place.at(name))[1]
    except (OSError, ValueError):
        return False


def remove_own(folder: str) -> None:
    """Remove a checkpoint of this layout from a folder, where another one took its place."""
    place = Place(folder)
    names = names_in_folder(folder)
    for marker in (place.stem + SUFFIX, place.stem + INDEX_SUFFIX):
        with suppress(OSError, ValueError):
            commit = find_commit(place) if marker in names else None
            if commit is not None and commit.number:
                for name in (commit.marker, *commit.files, commit.rest or commit.marker):
                    remove_file(place.at(name))


def markers_in(folder: str) -> list[str]:
    """The names of the files that make a folder a complete checkpoint of this layout, the one that counts first."""
    place = Place(folder)
    names = names_in_folder(folder)
    found = [name for name in (place.stem + INDEX_SUFFIX, place.stem + SUFFIX) if name in names]
    if len(found) > 1:  # a save was killed before it removed the other one
        with suppress(OSError, ValueError):
            commit = find_commit(place)
            found.sort(key=lambda name: commit is not None and name != commit.marker)
    return found


def is_own_folder(folder: str) -> bool:
    """Whether a folder holds a complete checkpoint that `fabric.save` wrote in this layout."""
    with suppress(OSError, ValueError):
        commit = find_commit(Place(folder))
        return commit is not None and commit.number > 0
    return False


def remove_object(path: str) -> None:
    """Remove the file of an object store that lies beside a folder of its name."""
    if local_path(path) is not None:
        return
    filesystem, inner = split_url(path)
    if is_object_store(filesystem) and filesystem.isfile(inner):
        with suppress(OSError):
            filesystem.rm_file(inner)


def remove_file(path: str) -> None:
    """Remove a file or folder, if it can be removed."""
    with suppress(OSError):
        local = local_path(path)
        if local is None:
            filesystem, inner = split_url(path)
            filesystem.rm(inner, recursive=True)
        elif os.path.isdir(local):
            shutil.rmtree(local)
        else:
            os.remove(local)
