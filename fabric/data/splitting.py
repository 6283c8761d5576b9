# SPDX-License-Identifier: Apache-2.0
"""Who splits an iterable data set: itself, its library, or Fabric."""

import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, IterDataPipe

_RANK_ATTRIBUTES = ("rank", "global_rank")
_SIZE_ATTRIBUTES = ("num_replicas", "world_size")
_RANK_CALLS = frozenset({"get_rank", "get_world_size"})
_WORKER_CALLS = frozenset({"get_worker_info", "num_workers"})
_RANK_STAGES = frozenset({"split_by_node", "single_node_only", "ResampledShards", "MultiShardSample"})
_WORKER_STAGES = frozenset({"split_by_worker"})
_DEPTH = 4  # so many functions and objects deep the search goes


class Splitting(NamedTuple):
    """What a data set does by itself.

    Args:
        over_ranks: Each rank gets another part.
        over_workers: Each of a loader's workers gets another part.
    """

    over_ranks: bool
    over_workers: bool


def is_hugging_face(dataset: Any) -> bool:
    """Whether this is a stream of Hugging Face's `datasets`."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(dataset, module.IterableDataset)


def splitting_of(dataset: Any, worker_init_fn: Callable[[int], None] | None = None) -> Splitting:
    """How a data set splits itself.

    Over the ranks: one that has a rank and a number of ranks as attributes (`rank` or `global_rank`, and `num_replicas`
    or `world_size`), one whose code asks `torch.distributed` for both, a pipeline with a stage of WebDataset's such as
    `split_by_node`, a data pipe, and a stream of `datasets` that was split by node. Over the workers: one whose code
    (or whose loader's `worker_init_fn`) asks `get_worker_info()` for the number of workers. The code is read, not run.

    Args:
        dataset: An iterable data set.
        worker_init_fn: That of its loader.
    """
    if isinstance(dataset, IterDataPipe):
        return Splitting(over_ranks=True, over_workers=True)
    if is_hugging_face(dataset):
        return Splitting(over_ranks=bool(getattr(dataset, "_distributed", None)), over_workers=True)
    names = set(_names_in([dataset, worker_init_fn]))
    return Splitting(
        over_ranks=_knows_its_rank(dataset) or names >= _RANK_CALLS or bool(names & _RANK_STAGES),
        over_workers=names >= _WORKER_CALLS or bool(names & _WORKER_STAGES),
    )


def _knows_its_rank(dataset: Any) -> bool:
    return any(_has(dataset, name) for name in _RANK_ATTRIBUTES) and any(
        _has(dataset, name) for name in _SIZE_ATTRIBUTES
    )


def _has(dataset: Any, name: str) -> bool:
    return isinstance(getattr(dataset, name, None), int)


def _names_in(objects: Iterable[Any], depth: int = _DEPTH) -> Iterator[str]:
    """The names that the code of objects uses: their methods, functions that these call, and parts that they hold."""
    for obj in objects:
        if isinstance(obj, FunctionType):
            if obj.__name__ in _RANK_STAGES | _WORKER_STAGES:
                yield obj.__name__
            elif depth and not _is_pytorchs(obj.__module__):
                yield from _names_in_function(obj, depth)
        elif depth and isinstance(obj, IterableDataset | list | tuple) and not isinstance(obj, IterDataPipe):
            yield type(obj).__name__
            yield from _names_in(_parts_of(obj), depth - 1)


def _names_in_function(function: FunctionType, depth: int) -> Iterator[str]:
    names = set(_names_in_code(function.__code__))
    yield from names
    called = (function.__globals__.get(name) for name in names)
    yield from _names_in((each for each in called if isinstance(each, FunctionType)), depth - 1)


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function, a generator or a comprehension inside
            yield from _names_in_code(constant)


def _parts_of(obj: Any) -> Iterator[Any]:
    if isinstance(obj, list | tuple):
        yield from obj[:100]
        return
    if isinstance(stages := vars(obj).get("pipeline"), list):  # WebDataset's way: what is not among them is not used
        yield stages
        return
    yield from vars(obj).values()
    for kind in type(obj).__mro__:
        if not _is_pytorchs(kind.__module__):
            yield from (value for value in vars(kind).values() if isinstance(value, FunctionType))


def _is_pytorchs(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in (torch.__name__, "typing", "builtins", "abc")
