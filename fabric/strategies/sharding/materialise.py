# SPDX-License-Identifier: Apache-2.0
"""Where the values of a model come from that is sharded: rank 0, or its own constructor, done shard by shard."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from fabric.checkpoint.state.shards import copy_shard, is_sharded, whole
from fabric.utilities.init import initialise, no_values, own_tensors, place_name, put_tensors
from fabric.utilities.parameter_names import plain_name
from fabric.utilities.recording import Recording, View, recording_context
from fabric.utilities.replay import replay

T = TypeVar("T")
Place = tuple[Module, str]  # a module that owns a tensor, and the tensor's name there
_BYTES_AT_ONCE = 2**22


@dataclass
class Slot:
    """A parameter or buffer of a model.

    Attributes:
        tensor: What it was before the model was sharded; on the meta device it has no values.
        name: Its plain name.
        places: Where it is; several where it is tied.
    """

    tensor: Tensor
    name: str
    places: list[Place] = field(default_factory=list)

    @property
    def current(self) -> Tensor:
        """What is in its first place now."""
        owner, name = self.places[0]
        return owner._parameters[name] if name in owner._parameters else owner._buffers[name]  # type: ignore[return-value]


@contextmanager
def started_context(
    module: Module, recordings: Sequence[Recording], device: torch.device, shard_device: torch.device
) -> Iterator[None]:
    """Give a model its values while it is sharded inside; collective.

    What rank 0 has for real, all ranks get from there. What is on the meta device on all ranks gets the values that
    its constructor, or else its initialisers, would give it, with rank 0's random numbers. Besides its shards no rank
    ever holds more than the few tensors that one step of these is about, but for what it had already.

    Args:
        module: The model, as the user made it.
        recordings: What the constructors did that ran on the meta device.
        device: Where values are made and sent, and where buffers go.
        shard_device: Where shards are kept.

    Raises:
        RuntimeError: On every rank, if there are tensors to which nothing gives values.
        ValueError: On every rank, if the ranks did not build the same model.
    """
    slots = find_slots(module)
    from_zero, any_meta = _agree_on_sources(module, slots)
    if not any_meta:
        send_from_zero([slot.tensor for slot in slots], device)
        yield
        return
    # Detached, since sharding empties the parameters that it takes away.
    aliases = list(_aliases(module, slots))
    given = {slot.places[0]: slot.tensor.detach() for slot, real in zip(slots, from_zero, strict=True) if real}
    put_tensors(_found(slots), lambda tensor: tensor if tensor.is_meta else tensor.detach().to("meta"))
    places = {(owner, name) for owner, name, _ in aliases}
    recordings, views = _agree_on_views(module, given, recordings, places)
    slots = find_slots(module)
    yield
    _allocate(module, slots, device, shard_device)
    for owner, name, slot in aliases:
        vars(owner)[name] = slot.current
    homes = []
    for slot in slots:
        place = next((place for place in slot.places if place in given), None)
        if place is None:
            homes.append((views[slot.places[0]], _Shard(slot.current, device)))
        else:
            _spread(given.pop(place), slot, device)
    constant, around = partial(_from_zero, device=device), partial(_drawing, device=device)
    replay(recordings, homes, device, constant=constant, around=around)


def find_slots(module: Module) -> list[Slot]:
    """The plain parameters and buffers of a model, in its own order."""
    slots: dict[int, Slot] = {}
    prefixes = {child: f"{prefix}." if prefix else "" for prefix, child in module.named_modules()}
    for owner, name, tensor in own_tensors(module):
        if not is_sharded(tensor):
            new = Slot(tensor, plain_name(prefixes[owner] + name))
            slots.setdefault(id(tensor), new).places.append((owner, name))
    return list(slots.values())


def _aliases(module: Module, slots: list[Slot]) -> Iterator[tuple[Module, str, Slot]]:
    """Plain attributes that are one of the buffers."""
    by_id = {id(slot.tensor): slot for slot in slots}
    for owner in module.modules():
        for name, value in vars(owner).items():
            if isinstance(value, Tensor) and id(value) in by_id:
                yield owner, name, by_id[id(value)]


def _found(slots: Iterable[Slot]) -> Iterator[tuple[Module, str, Tensor]]:
    for slot in slots:
        for owner, name in slot.places:
            yield owner, name, slot.tensor


# what the ranks have to agree on


def _agree_on_sources(module: Module, slots: list[Slot]) -> tuple[list[bool], bool]:
    """Which slots rank 0 has for real, and whether any rank has any on the meta device."""
    lines = [f"`{slot.name}` {_kind(slot)}" for slot in slots]
    metas = [slot.tensor.is_meta for slot in slots]
    ranks = _gathered((_digest(lines), metas))
    if any(digest != ranks[0][0] for digest, _ in ranks):
        raise ValueError(_difference(module, _gathered(lines)))
    zero = ranks[0][1]
    for rank, (_, others) in enumerate(ranks):
        for slot, on_zero, here in zip(slots, zero, others, strict=True):
            if on_zero and not here:
                raise RuntimeError(
                    f"`fabric.setup(...)`: `{slot.name}` of `{type(module).__name__}` is on the meta device on rank 0"
                    f" and has values on rank {rank}. Create the model for real on rank 0, which hands it on, or on no"
                    " rank: `with fabric.init_module(empty_init=not fabric.is_global_zero):` or"
                    " `with fabric.init_module(empty_init=True):`."
                )
    return [not meta for meta in zero], any(any(others) for _, others in ranks)


def _kind(slot: Slot) -> str:
    tied = f" in {len(slot.places)} places" if len(slot.places) > 1 else ""
    return f"{str(slot.tensor.dtype).removeprefix('torch.')} {list(slot.tensor.shape)}{tied}"


def _difference(module: Module, ranks: list[list[str]]) -> str:
    for rank, lines in enumerate(ranks):
        for own, other in zip_longest(ranks[0], lines, fillvalue="nothing more"):
            if own != other:
                return (
                    f"`fabric.setup(...)`: the ranks built `{type(module).__name__}` in different ways: where rank 0"
                    f" has {own}, rank {rank} has {other}. Build the same model on every rank."
                )
    raise AssertionError("unreachable: the digests of equal lines are equal")


def _agree_on_views(
    module: Module, given: Mapping[Place, Tensor], recordings: Sequence[Recording], aliases: Collection[Place]
) -> tuple[list[Recording], dict[Place, View]]:
    """All that has to be done for the values that rank 0 does not give, and where in it they are."""
    cause: Exception | None = None
    found = list(recordings)
    views: dict[Place, View] = {}
    try:
        found, views = _find_views(module, given, recordings, aliases)
    except Exception as exception:  # the ranks that wait have to learn of it
        cause = exception
    digest = _digest(line for recording in found for line in recording.describe())
    ranks = _gathered((str(cause or ""), digest))
    for text, _ in ranks:
        if text:
            raise RuntimeError(f"`fabric.setup(...)`: {text}") from cause
    if any(other != digest for _, other in ranks):
        raise ValueError(
            f"`fabric.setup(...)`: the constructor of `{type(module).__name__}` did not do the same on every rank."
            " Pass it the same arguments, and let it not depend on the rank or on numbers drawn before."
        )
    return found, views


def _find_views(
    module: Module, given: Mapping[Place, Tensor], recordings: Sequence[Recording], aliases: Collection[Place]
) -> tuple[list[Recording], dict[Place, View]]:
    _validate_attributes(module, aliases)
    found = [*recordings]
    missing = {id(slot.tensor) for slot in find_slots(module) if not _view(slot, found, given)}

    def wanted(child: Module) -> bool:
        return "reset_parameters" in vars(child) or any(id(tensor) in missing for *_, tensor in own_tensors(child))

    if missing or any("reset_parameters" in vars(child) for child in module.modules()):
        with recording_context() as recording:
            initialise(module, wanted)
        found.append(recording)
    views = {slot.places[0]: _view(slot, found, given) for slot in find_slots(module)}
    nowhere = [place for place, view in views.items() if view is None]
    if nowhere:
        raise RuntimeError(no_values(module, nowhere))
    wanted_views = {place: view for place, view in views.items() if view is not None and view is not _GIVEN}
    keys = {view.key for view in wanted_views.values()}
    return [recording for recording in found if keys & recording.storages.keys()], wanted_views


def _validate_attributes(module: Module, aliases: Collection[Place]) -> None:
    for owner in module.modules():
        for name, value in vars(owner).items():
            if isinstance(value, Tensor) and value.is_meta and (owner, name) not in aliases:
                raise RuntimeError(
                    f"`{place_name(module, owner, name)}` of `{type(module).__name__}` is on the meta device and is"
                    " neither a parameter nor a buffer, so that nothing gives it values. Register it in the constructor"
                    f" of `{type(owner).__name__}`: `self.register_buffer('{name}', ..., persistent=False)`."
                )


_GIVEN = View(0, torch.uint8, (), (), 0)  # stands for what comes from rank 0


def _view(slot: Slot, recordings: Sequence[Recording], given: Mapping[Place, Tensor]) -> View | None:
    if any(place in given for place in slot.places):
        return _GIVEN
    for recording in reversed(recordings):
        for owner, name in slot.places:
            if recording.was_changed(owner, name):
                raise RuntimeError(
                    f"`{type(owner).__name__}.{name}` was written to on the meta device after"
                    " `init_module` had ended, and what was written is lost. Do it inside of"
                    " `with fabric.init_module(empty_init=True):`, which notes it, or after `fabric.setup`."
                )
            view = recording.find(owner, name, slot.tensor)
            if view is not None:
                return view
    return None


def _gathered(value: T) -> list[T]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, value)
    return ranks


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


# memory


@torch.no_grad()
def _allocate(module: Module, slots: Sequence[Slot], device: torch.device, shard_device: torch.device) -> None:
    """Memory for the shards and the buffers of a model that was sharded on the meta device."""
    known = {place for slot in slots for place in slot.places}
    metas = [found for found in own_tensors(module) if found[2].is_meta]
    for owner, name, _ in metas:
        if (owner, name) not in known:
            raise RuntimeError(
                f"`fabric.setup(...)`: `{place_name(module, owner, name)}` of `{type(module).__name__}` came on the"
                " meta device while the model was sharded. Let `parallelize_fn` keep the modules of the model."
            )
    shards = {id(tensor): tensor for *_, tensor in metas if is_sharded(tensor) and isinstance(tensor, Parameter)}
    for shard in shards.values():
        new = Parameter(torch.empty_like(shard, device=shard_device), requires_grad=shard.requires_grad)
        new.__dict__.update(shard.__dict__)
        torch.utils.swap_tensors(shard, new)  # in place: `fully_shard` holds the object
    others = [found for found in metas if id(found[2]) not in shards]
    put_tensors(others, lambda tensor: torch.empty_like(tensor, device=device, requires_grad=False))


class _Shard:
    """This rank's part of a parameter, or a buffer."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor = tensor.detach()
        self._device = device
        self.dtype = tensor.dtype

    def keep(self, whole: Tensor) -> None:
        copy_shard(self._tensor, whole)

    def whole(self) -> Tensor:
        tensor = self._tensor.to(self._device)
        if not is_sharded(tensor):
            return tensor.clone(memory_format=torch.contiguous_format)
        return whole(tensor).contiguous()


# values


@torch.no_grad()
def send_from_zero(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Give all ranks rank 0's values, in place; collective.

    Args:
        tensors: On any device, with the same dtypes and shapes on all ranks.
        device: Where they are sent from.
    """
    if dist.get_world_size() == 1:
        return
    for batch in _batches(tensors):
        parts = [tensor.detach().reshape(-1).to(device) for tensor in batch]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        dist.broadcast(flat.view(torch.uint8), src=0)
        if dist.get_rank():
            for tensor, part in zip(batch, torch.split(flat, [len(part) for part in parts]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, of some megabytes together."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        batch: list[Tensor] = []
        size = 0
        for tensor in alike:
            if batch and size + tensor.nbytes > _BYTES_AT_ONCE:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.nbytes
        yield batch


def _spread(tensor: Tensor, slot: Slot, device: torch.device) -> None:
    """Put rank 0's values of one tensor into the shards of all ranks."""
    if dist.get_rank():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copy_shard(slot.current.detach(), _from_zero(tensor, device))


def _from_zero(tensor: Tensor, device: torch.device) -> Tensor:
    """Rank 0's values of a tensor, in memory of their own where they could not be sent from where they are."""
    sent = tensor.detach().to(device).contiguous()
    if sent.numel():
        dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
    return sent


@contextmanager
def _drawing(recording: Recording, device: torch.device) -> Iterator[None]:
    """Random numbers from where rank 0's generators are: alike on all ranks.

    Those of a rank that were in the same state as rank 0's, its own among them, have then moved on as the constructor
    would have moved them; those of others are left as they were. A model that was made beside another one, which is set
    up already, gets the numbers that followed on the other's.
    """
    own = _states(device)
    box = [own]
    dist.broadcast_object_list(box, src=0)
    first = recording.start is None
    recording.start = recording.start or box[0]
    _set_states(recording.start, device)
    try:
        yield
    finally:
        if not first or any(not torch.equal(a, b) for a, b in zip(own, box[0], strict=True)):
            _set_states(own, device)


def _states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _set_states(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
