# SPDX-License-Identifier: Apache-2.0
"""Sharding a model: its units, then the rest of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, LayerNorm, Module, SyncBatchNorm
from typing_extensions import override

from fabric.checkpoint.state.shards import is_sharded
from fabric.strategies.entry import _Entry
from fabric.strategies.sharding.units import Units, uncompiled, without_tied
from fabric.utilities.apply_func import apply_to_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

_BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
_OTHER_NORMS = (LayerNorm, GroupNorm)


@dataclass(frozen=True)
class ShardingOptions:
    """What `fully_shard` is told for each unit and for the rest.

    Args:
        mesh: One dimension shards; of two the first replicates.
        reshard_after_forward: Whether units are freed between forward and backward; a number shards them less finely.
        mixed_precision: Dtypes of gathered parameters and reduced gradients.
        offload: Where the shards are kept.
        with_autocast: Whether forward runs under autocast, which then knows better what needs float32.
        others: Further arguments.
    """

    mesh: DeviceMesh
    reshard_after_forward: bool | int
    mixed_precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    with_autocast: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for a unit."""
        return {
            "mesh": self.mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": self.mixed_precision,
            "offload_policy": self.offload,
            **self.others,
        }

    @property
    def arguments_of_rest(self) -> dict[str, Any]:
        """Keyword arguments for what is in no unit."""
        policy = self.mixed_precision
        if self.with_autocast:
            policy = replace(policy, cast_forward_inputs=False)
        elif policy.param_dtype is not None and policy.output_dtype is None:
            policy = replace(policy, output_dtype=torch.float32)  # for the rest alone: on a unit it breaks the next one
        # Backward begins with the rest of the model, so None lets PyTorch keep that gathered.
        reshard = None if self.reshard_after_forward is True else self.reshard_after_forward
        return {**self.arguments, "mp_policy": policy, "reshard_after_forward": reshard}

    @property
    def arguments_in_float32(self) -> dict[str, Any]:
        """Keyword arguments for a small unit whose parameters are not gathered in half precision."""
        policy = replace(self.mixed_precision, param_dtype=None, cast_forward_inputs=False)
        return {**self.arguments, "mp_policy": policy}


class _ShardedEntry(_Entry):
    """The `_Entry` of a sharded model; `fully_shard` makes an `FSDPModule` of it."""

    has_run = False

    @override
    def forward(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.inner(*args, **kwargs) if method == "forward" else getattr(self.inner, method)(*args, **kwargs)
        except BaseException:
            reset_after_error(self)
            raise


def shard_module(module: Module, units: Units, options: ShardingOptions) -> Module:
    """Shard a model in place.

    Args:
        module: The user's model.
        units: Submodules that are gathered and freed as one.
        options: What `fully_shard` is told.

    Returns:
        What a forward calls: an `_Entry` around the model, which holds all that is in no unit.
    """
    small = _small_units(module, units, options)
    for name, child in reversed(list(module.named_modules())):
        if name and (name in units.modules or name in small):
            shard_unit(child, **(small.get(name) or options.arguments))
    entry = _ShardedEntry(module)
    shard_unit(entry, **options.arguments_of_rest)
    entry.register_forward_pre_hook(_allocate_outside_of_inference, prepend=True)
    entry.register_forward_hook(_reshard_without_gradients)
    return entry


def shard_unit(unit: Module, **arguments: Any) -> None:
    """`fully_shard`, after which the memory of the whole parameters is free even if an optimizer still knows them."""
    from torch.distributed.fsdp import fully_shard

    unit.register_forward_hook(torch.compiler.disable(_own_outputs))  # it runs before that of `fully_shard`
    before = list(unit.parameters())
    for parameter in before:
        if not parameter.is_contiguous() and not is_sharded(parameter):
            parameter.data = parameter.data.contiguous()  # `fully_shard` takes no others
    fully_shard(unit, **arguments)
    after = {id(parameter) for parameter in unit.parameters()}
    for parameter in before:
        if id(parameter) not in after and not is_sharded(parameter):
            parameter.data = parameter.data.new_empty(0)


def refuse_sharded(module: Module) -> None:
    """Raise for a module that `fully_shard` must not get.

    Raises:
        RuntimeError: If it, or a part of it, is sharded already.
        ValueError: If a parameter can't be sharded, or has hooks.
    """
    owner = type(module).__name__
    sharded = [name for name, parameter in module.named_parameters() if is_sharded(parameter)]
    if sharded:
        raise RuntimeError(
            f"`fabric.setup(...)`: `{owner}` is sharded already, `{sharded[0]}` for example. Set up each module once,"
            " as you made it, and leave `fully_shard` to the strategy; with `ModelParallelStrategy(parallelize_fn=...)`"
            " you can call it yourself."
        )
    scalars = [name for name, parameter in module.named_parameters() if not parameter.dim()]
    if scalars:
        raise ValueError(
            f"`fabric.setup(...)`: the parameter `{scalars[0]}` of `{owner}` is a scalar, which can't be sharded. Make"
            " it a vector of one element: `torch.nn.Parameter(torch.ones(1))`."
        )
    # Nothing public tells, and sharding, which puts other parameters in the place of these, would lose them silently.
    hooked = [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise ValueError(
            f"`fabric.setup(...)`: the parameter `{hooked[0]}` of `{owner}` has a hook, which would never be called:"
            " sharding puts another parameter in its place. Register it on the model that `setup` returns, with"
            " `register_post_accumulate_grad_hook`; it is given the shard and its gradient."
        )


def sharded_parts(module: Module) -> list[Any]:
    """The modules in which `fully_shard` was called."""
    from torch.distributed.fsdp import FSDPModule

    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def gather_nothing(module: Module) -> None:
    """Free what forward has gathered, so that the parameters are shards again."""
    for part in sharded_parts(module):
        part.reshard()


def _allocate_outside_of_inference(entry: Module, args: Any) -> None:
    """Gather each part once before a first forward in inference mode, whose tensors a later training could not use."""
    if isinstance(entry, _ShardedEntry) and not entry.has_run:
        entry.has_run = True
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                for part in sharded_parts(entry):
                    part.unshard()
                    part.reshard()


def drop_unsent_gradients(module: Module, chosen: AbstractSet[int]) -> None:
    """Forget what backward has kept for a later one to send. It is not in `.grad`, so that `zero_grad` leaves it.

    Args:
        module: What is called in forward.
        chosen: The `id` of each parameter whose gradient is to go.
    """
    for part in sharded_parts(module):
        # Nothing public reaches these gradients without gathering all parameters once more.
        for group in part._get_fsdp_state()._fsdp_param_groups:
            trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
            # A parameter has another object while it is gathered, made by the first forward.
            names = [{id(each.sharded_param), id(getattr(each, "_unsharded_param", None))} for each in trained]
            drops = [not chosen.isdisjoint(own) for own in names]
            if any(drops):
                _drop_whole(trained, drops)
                _drop_sums(group, trained, drops)


def _drop_whole(trained: list[Any], drops: list[bool]) -> None:
    for each, drop in zip(trained, drops, strict=True):
        kept = each.unsharded_accumulated_grad
        if drop and kept is not None:  # beside others that stay PyTorch takes no gradient of another dtype
            each.unsharded_accumulated_grad = None if all(drops) else kept.zero_()
        if drop and hasattr(each, "_unsharded_param"):
            each._unsharded_param.grad = None


def _drop_sums(group: Any, trained: list[Any], drops: list[bool]) -> None:
    """Of hybrid sharding: what was added up over the shards, in one vector, and not over the copies yet."""
    sums, start = group._partial_reduce_output, 0
    if sums is None:
        return
    sizes = [each.padded_sharded_param_size.numel() for each in trained]
    if all(drops) or sum(sizes) != sums.numel():
        group._partial_reduce_output = None
        return
    for size, drop in zip(sizes, drops, strict=True):
        if drop:
            sums[start : start + size] = 0
        start += size


def reset_after_error(entry: Module) -> None:
    """Forget the step that an error broke off, so that the next one starts anew."""
    entry = uncompiled(entry)
    if isinstance(entry, _ShardedEntry):
        entry.reset_iter_state()  # type: ignore[operator]


def _own_outputs(unit: Any, args: Any, output: Any) -> Any:
    """Copy what is a view of another tensor: an operation in place on it would lose the hook that starts backward."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor

    return apply_to_tensors(output, own) if torch.is_grad_enabled() else None


def _reshard_without_gradients(entry: Module, args: Any, output: Any) -> None:
    """Some parts stay gathered for a backward; where none comes, they would be plain tensors from then on."""
    if not torch.is_grad_enabled() or not (_requires_gradients(output) or any(map(_is_trained, entry.parameters()))):
        gather_nothing(entry)


def _requires_gradients(output: Any) -> bool:
    found = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor.requires_grad)
        return tensor

    apply_to_tensors(output, look)
    return any(found)


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad


def _small_units(module: Module, units: Units, options: ShardingOptions) -> dict[str, dict[str, Any]]:
    """Layers that can't share a unit with what is around them, by name, with their arguments for `fully_shard`."""
    small = _in_float32(module, units, options) if options.with_autocast else {}
    chosen = units.modules | {name: module.get_submodule(name) for name in small}
    for name in _of_other_dtype(module, chosen):
        small[name] = options.arguments
    together = Units(chosen | {name: module.get_submodule(name) for name in small}, "")
    tied = without_tied(module, together).tied
    return {name: arguments for name, arguments in small.items() if name not in tied}


def _in_float32(module: Module, units: Units, options: ShardingOptions) -> dict[str, dict[str, Any]]:
    """Normalisation whose parameters stay float32, as under plain autocast.

    On a CPU it takes half-precision parameters only for half-precision inputs, and outside of a unit inputs are what
    the user's code makes them; batch normalisation never takes them, since its statistics are float32.
    """
    inside = {id(child) for unit in units.modules.values() for child in unit.modules()}
    return {
        name: options.arguments_in_float32
        for name, child in module.named_modules()
        if name
        and any(True for _ in child.parameters(recurse=False))
        and (isinstance(child, _BATCH_NORMS) or (isinstance(child, _OTHER_NORMS) and id(child) not in inside))
    }


def _of_other_dtype(module: Module, units: Mapping[str, Module]) -> list[str]:
    """Layers of another dtype than most of the unit that they are in: `fully_shard` takes one dtype per unit.

    Raises:
        ValueError: If a layer that has submodules, or the unit itself, holds them.
    """
    found: list[str] = []
    for owner, layers in _layers_of_units(module, units).items():
        sizes: Counter[torch.dtype] = Counter()
        for layer in layers.values():
            for parameter in _trainable(layer):
                sizes[parameter.dtype] += parameter.numel()
        for name, layer in layers.items():
            dtypes = {p.dtype for p in _trainable(layer)} - {dtype for dtype, _ in sizes.most_common(1)}
            if not dtypes:
                continue
            if name == owner or len({p.dtype for p in _trainable(layer)}) > 1 or any(True for _ in layer.children()):
                raise ValueError(
                    f"`{name or type(module).__name__}` holds parameters of {_names(sizes)} side by side, and what is"
                    " sharded as a unit has one dtype. Convert it with `module.to(dtype)`, or put the parameters of"
                    " the other dtype into a submodule of their own."
                )
            found.append(name)
    return found


def _layers_of_units(module: Module, units: Mapping[str, Module]) -> dict[str, dict[str, Module]]:
    """For each unit, and for the rest under "", the modules with parameters of their own that belong to it."""
    of_unit: dict[str, dict[str, Module]] = {}
    owners: dict[str, str] = {}
    for name, child in module.named_modules():
        parent = name.rpartition(".")[0]
        owners[name] = name if name in units else owners.get(parent, "")
        if _trainable(child):
            of_unit.setdefault(owners[name], {})[name] = child
    return of_unit


def _trainable(layer: Module) -> list[Tensor]:
    return [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad]


def _names(dtypes: Counter[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
