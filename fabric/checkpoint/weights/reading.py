# SPDX-License-Identifier: Apache-2.0
"""Reading weights that Hugging Face or `fabric.save(..., format="safetensors")` wrote, in one file or in several."""

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from fabric.checkpoint.files.safetensors_file import damaged_file, later_safetensors, read_safetensors
from fabric.checkpoint.files.torch_file import read_torch_file
from fabric.checkpoint.state.naming import parts_in
from fabric.checkpoint.weights.places import (
    INDEX_SUFFIX,
    SUFFIX,
    Place,
    find_commit,
    names_in_folder,
    place_of,
    read_index,
)
from fabric.plugins.io import CheckpointIO
from fabric.plugins.io.whole_file import os_errors_name
from fabric.utilities.types import PathLike

_TORCH = "pytorch_model.bin"  # Hugging Face's name for weights that `torch.save` wrote
_TORCH_INDEX = f"{_TORCH}.index.json"
Reader = Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint whose weights stand alone.

    Args:
        place: Where they are.
        files: For each file of weights the names that it must hold; None where any will do.
        are_safetensors: Whether they are, or were written by `torch.save`.
        rest: The file with everything else.
        ties: Weights that are another one's under a second name.
    """

    place: Place
    files: Mapping[str, frozenset[str] | None]
    are_safetensors: bool
    rest: str | None
    ties: Mapping[str, str]


def is_weights_path(path: PathLike) -> bool:
    """Whether a path is by its name a file of `safetensors`, or an index of several."""
    return os.fspath(path).endswith((SUFFIX, INDEX_SUFFIX))


def find_files(path: PathLike) -> Files | None:
    """What there is of this layout at a path, a folder or a file; None where there is nothing.

    Raises:
        FileNotFoundError: If the path is that of a file that is missing.
        ValueError: If it is damaged or incomplete.
    """
    text = os.fspath(path)
    with os_errors_name(path):
        place = place_of(path)
        if not is_weights_path(path):
            place = Place(place.folder, _stem_in(place.folder))
        elif text.endswith(SUFFIX) and place.stem + SUFFIX not in names_in_folder(place.folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        names = names_in_folder(place.folder)
        commit = find_commit(place)
        if commit is not None:
            rest = commit.rest if commit.rest in names else None  # weights may travel alone
            return Files(place, commit.files, True, rest, commit.ties)
        if _TORCH in names:
            return Files(place, {_TORCH: None}, False, None, {})
        if _TORCH_INDEX in names:
            return Files(place, read_index(place.at(_TORCH_INDEX), names)[0], False, None, {})
    return None


def _stem_in(folder: str) -> str:
    """`model`; or another one, if there is but one in a folder: Hugging Face's libraries have several names."""
    stems = set()
    for name in names_in_folder(folder):
        if name.endswith(INDEX_SUFFIX):
            stems.add(name.removesuffix(INDEX_SUFFIX))
        elif name.endswith(SUFFIX) and "-of-" not in name:
            stems.add(name.removesuffix(SUFFIX))
    return stems.pop() if len(stems) == 1 else "model"


def read_files(files: Files, io: CheckpointIO, weights_only: bool) -> Any:
    """Their content; the tensors of local files are views of them.

    Raises:
        OSError: If a file can't be read.
        ValueError: If one is damaged.
        pickle.UnpicklingError: If one holds what is refused.
    """

    def of_torch(path: str) -> Any:
        return io.map_checkpoint(path, weights_only=weights_only)

    weights = _weights(files, (lambda path: read_safetensors(path)[0]) if files.are_safetensors else of_torch)
    rest = None if files.rest is None else of_torch(files.place.at(files.rest))
    return _together(files, weights, rest)


def read_files_later(files: Files, weights_only: bool = True) -> Any:
    """The same with a `Later` in the place of each tensor."""

    def of_torch(path: str) -> Any:
        return read_torch_file(path, weights_only)

    weights = _weights(files, (lambda path: later_safetensors(path)[0]) if files.are_safetensors else of_torch)
    rest = None if files.rest is None else of_torch(files.place.at(files.rest))
    return _together(files, weights, rest)


def _weights(files: Files, read: Reader) -> dict[str, Any]:
    weights: dict[str, Any] = OrderedDict()
    for name, expected in files.files.items():
        path = files.place.at(name)
        found = read(path)
        if not isinstance(found, Mapping):
            raise damaged_file(path, f"it holds a {type(found).__name__}")
        missing = sorted((expected or frozenset()) - found.keys())
        if missing:
            raise damaged_file(path, f"`{missing[0]}` is missing in it")
        weights.update({key: found[key] for key in found if expected is None or key in expected})
    weights |= {name: weights[kept] for name, kept in files.ties.items() if kept in weights}
    return weights


def _together(files: Files, weights: Mapping[str, Any], rest: Any) -> Any:
    if rest is None:
        return weights
    try:
        content = rest["state"]
        for note in rest["modules"]:
            own = {name: weights[note["prefix"] + name] for name in note["names"] if name not in note["others"]}
            state = OrderedDict((name, note["others"].get(name, own.get(name))) for name in note["names"])
            state._metadata = OrderedDict(note["versions"])  # type: ignore[attr-defined]
            content = _put(content, note["path"], state)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        path = files.place.at(files.rest or "")
        raise damaged_file(path, f"it does not belong to the weights: {type(error).__name__}: {error}") from error
    return content


def _put(content: Any, path: list[Any], state: Any) -> Any:
    """The content with a module's state at its place."""
    if not path:
        return state
    if isinstance(content, tuple):
        items = list(content)
        items[path[0]] = _put(items[path[0]], path[1:], state)
        return tuple(items)
    content[path[0]] = _put(content[path[0]], path[1:], state)
    return content


def for_module_in(content: Any, state: Any) -> Any:
    """Weights alone, for a `state` with one module: under the module's name there.

    Args:
        content: What a file or folder holds.
        state: What is to be restored.
    """
    modules = [path for path, part in parts_in(state) if isinstance(part, Module)]
    if len(modules) != 1 or len(modules[0]) != 1 or modules[0][0] in content:
        return content
    key = next(key for key in state if str(key) == modules[0][0])
    return {key: content}
