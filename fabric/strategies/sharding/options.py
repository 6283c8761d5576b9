# SPDX-License-Identifier: Apache-2.0
"""What the strategies that shard parameters are told about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch.nn import Parameter

from fabric.strategies.sharding.units import Policy, validated_policy
from fabric.utilities.spelling import suggest

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

Accumulation = Literal["unsharded", "sharded"]
_FURTHER = ("ignored_params", "shard_placement_fn")
# What programs pass to PyTorch's former wrapper class.
_OF_FORMER = (
    *("backward_prefetch", "forward_prefetch", "limit_all_gathers", "param_init_fn", "sync_module_states"),
    *("use_orig_params",),
)


@dataclass(frozen=True)
class ShardingArguments:
    """The arguments about sharding that several strategies share, checked.

    Args:
        call: The strategy as the user wrote it, for errors.
        auto_wrap_policy: What is a unit; None for the repeated blocks.
        activation_checkpointing_policy: What computes its activations again in backward; None for nothing.
        reshard_after_forward: Whether units are freed between forward and backward; a number shards them less finely.
        cpu_offload: Whether, or how, shards are kept in the machine's memory.
        mixed_precision: Dtypes, in the place of what the precision says.
        accumulation: What `no_backward_sync` leaves unsent.
        others: Further arguments of `fully_shard`.
    """

    call: str
    auto_wrap_policy: Policy | None = None
    activation_checkpointing_policy: Policy | None = None
    reshard_after_forward: bool | int = True
    cpu_offload: bool | OffloadPolicy = False
    mixed_precision: MixedPrecisionPolicy | None = None
    accumulation: Accumulation = "unsharded"
    others: Mapping[str, Any] = field(default_factory=dict)

    def offload_policy(self, device_type: str) -> OffloadPolicy:
        """Where shards are kept while `device_type` computes.

        Raises:
            ValueError: If it pins memory for a device that has no use of it.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        if isinstance(self.cpu_offload, bool):
            return CPUOffloadPolicy(pin_memory=device_type != "cpu") if self.cpu_offload else OffloadPolicy()
        if device_type == "cpu" and getattr(self.cpu_offload, "pin_memory", False):
            raise ValueError(
                f"`{self.call}(cpu_offload={self.cpu_offload!r})` pins memory, which needs an accelerator, but this run"
                " is on the CPU. Write `cpu_offload=True`, which pins where it can."
            )
        return self.cpu_offload

    def finest(self, shards: int) -> bool | int:
        """`reshard_after_forward` for so many shards.

        Raises:
            ValueError: If its number does not divide them.
        """
        number = self.reshard_after_forward
        if isinstance(number, bool) or number in (1, shards):
            return number if isinstance(number, bool) else number != 1
        if shards % number:
            raise ValueError(
                f"`{self.call}(reshard_after_forward={number})` must divide the {shards} ranks over which parameters"
                " are sharded. Choose such a number, or True or False."
            )
        return number


def validated_arguments(call: str, *, others: Mapping[str, Any] | None = None, **given: Any) -> ShardingArguments:
    """Check what the user wrote.

    Args:
        call: The strategy, for errors.
        others: Further arguments of `fully_shard`.
        **given: The fields of `ShardingArguments`.

    Raises:
        TypeError: If an argument is of the wrong type, or not known.
        ValueError: If a value is none of the choices.
    """
    for name in ("auto_wrap_policy", "activation_checkpointing_policy"):
        given[name] = validated_policy(given.get(name), f"{call}({name}=...)")
    _validate_number(call, given.get("reshard_after_forward", True))
    _validate_policies(call, given.get("cpu_offload", False), given.get("mixed_precision"))
    accumulation = given.get("accumulation", "unsharded")
    if accumulation not in ("unsharded", "sharded"):
        raise ValueError(
            f"`{call}(accumulation={accumulation!r})` is not a way to accumulate. {suggest(str(accumulation), _WAYS)}"
        )
    for name, value in (others or {}).items():
        _validate_further(call, name, value, [*given, *_FURTHER])
    return ShardingArguments(call, others=dict(others or {}), **given)


_WAYS = ("unsharded", "sharded")


def validated_state_dict_type(call: str, layout: Any) -> Literal["full", "sharded"]:
    """The layout of checkpoints.

    Raises:
        ValueError: If it is none.
    """
    if layout not in ("full", "sharded"):
        raise ValueError(
            f"`{call}(state_dict_type={layout!r})` is not a layout of checkpoints."
            f" {suggest(layout, ('full', 'sharded'))}"
        )
    return layout  # type: ignore[no-any-return]


def _validate_further(call: str, name: str, value: Any, known: list[str]) -> None:
    if name in _OF_FORMER:
        raise TypeError(
            f"`{call}({name}=...)` belongs to PyTorch's former `FullyShardedDataParallel`; `fully_shard` needs no such"
            " option. Leave it out."
        )
    if name not in _FURTHER:
        raise TypeError(f"`{call}({name}=...)` is not an argument. {suggest(name, known)}")
    if name == "shard_placement_fn" and not callable(value):
        raise TypeError(f"`{call}(shard_placement_fn={value!r})` takes a function of a parameter.")
    if name == "ignored_params" and not (
        isinstance(value, set | frozenset) and all(isinstance(each, Parameter) for each in value)
    ):
        raise TypeError(f"`{call}(ignored_params=...)` takes a set of parameters: `set(model.head.parameters())`.")


def _validate_number(call: str, number: Any) -> None:
    if not isinstance(number, int) or (not isinstance(number, bool) and number < 1):
        raise ValueError(
            f"`{call}(reshard_after_forward={number!r})` is neither True, False, nor a number of ranks to which units"
            " are sharded between forward and backward."
        )


def _validate_policies(call: str, offload: Any, mixed: Any) -> None:
    if not isinstance(offload, bool) and not _is_from_fsdp(offload, "OffloadPolicy"):
        raise TypeError(
            f"`{call}(cpu_offload={offload!r})` takes True, False, or a `torch.distributed.fsdp.CPUOffloadPolicy(...)`."
        )
    if mixed is not None and not _is_from_fsdp(mixed, "MixedPrecisionPolicy"):
        raise TypeError(
            f"`{call}(mixed_precision={mixed!r})` takes a `torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=...,"
            " reduce_dtype=...)`. Without it the precision of `Fabric(precision=...)` decides."
        )


def _is_from_fsdp(value: object, name: str) -> bool:
    """Whether it is an instance of that class, which is slow to import, and which who has one has imported."""
    kinds = (kind for kind in type(value).__mro__ if kind.__module__.startswith("torch.distributed.fsdp"))
    return any(kind.__name__ == name for kind in kinds)
