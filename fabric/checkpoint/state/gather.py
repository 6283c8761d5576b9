# SPDX-License-Identifier: Apache-2.0
"""From what each rank holds to one whole content on rank 0, tensor by tensor."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from fabric.checkpoint.access import Attempts, StateAccess
from fabric.checkpoint.state.shards import is_sharded, whole
from fabric.checkpoint.state.tree import at
from fabric.utilities.parameter_names import plain_name, rebuilt


def places_of_shards(value: Any, where: str) -> Iterator[str]:
    """Where in a content its sharded tensors are, in the order in which `gathered` asks for them."""
    if is_sharded(value):
        yield where
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from places_of_shards(item, at(where, key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from places_of_shards(item, at(where, index))


def hash_of(places: list[str]) -> str:
    """The same on two ranks if they ask for the same shards in the same order."""
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


def unlike_shards(places: list[list[str]]) -> ValueError:
    """The error for ranks that would not ask for the same shards: they would wait for each other for ever.

    Args:
        places: What `places_of_shards` says on each rank.
    """
    rank, others = next((rank, others) for rank, others in enumerate(places) if others != places[0])
    odd = sorted(set(others).symmetric_difference(places[0]))
    if not odd:
        return ValueError(
            f"`fabric.save`: ranks 0 and {rank} hold the same sharded tensors in another order."
            " Build `state` in the same order on all ranks."
        )
    has, has_not = (rank, 0) if odd[0] in others else (0, rank)
    return ValueError(
        f"`fabric.save`: `{odd[0]}` is a sharded tensor that rank {has} saves and rank {has_not} does not."
        " Pass the same `state` and `filter` on all ranks."
    )


def gathered(
    value: Any,
    access: StateAccess,
    attempts: Attempts,
    keep: Callable[[Tensor], Any] = Tensor.cpu,
    done: dict[int, Any] | None = None,
) -> Any:
    """The same content with whole tensors on the CPU of rank 0, and nothing in their place on the others.

    There is never more than one whole tensor on the device, or on another rank than 0. A tensor that is there twice
    stays one.

    Args:
        value: The content, with the same shards in the same order on all ranks.
        access: The strategy.
        attempts: Where errors are kept.
        keep: What rank 0 makes of each whole tensor.
        done: By its id, what was made of a shard before.
    """
    done = {} if done is None else done
    if is_sharded(value):
        if id(value) not in done:
            done[id(value)] = None
            with attempts:
                full = whole(value)
                done[id(value)] = keep(full) if access.is_global_zero else None
        return done[id(value)]
    if isinstance(value, Mapping):
        entries = {key: gathered(item, access, attempts, keep, done) for key, item in value.items()}
        return rebuilt(value, entries) if isinstance(value, OrderedDict) else entries
    if type(value) in (list, tuple):
        return type(value)(gathered(item, access, attempts, keep, done) for item in value)
    return value


def with_ties(state_dict: Mapping[str, Any], module: Module) -> Mapping[str, Any]:
    """A module's state in which the names of one sharded parameter have one tensor, and not one each.

    The parameters say so, and not the memory of the shards, since a shard may have none: all ranks must agree.
    """
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        name = plain_name(name)
        one = first.setdefault(id(parameter), name)
        if one != name and is_sharded(state_dict.get(name)) and one in state_dict:
            ties[name] = state_dict[one]
    return rebuilt(state_dict, {**state_dict, **ties}) if ties else state_dict
