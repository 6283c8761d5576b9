# SPDX-License-Identifier: Apache-2.0
"""What `fabric.explain()` says about a model that was sharded."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from fabric.strategies.sharding.apply import ShardingOptions
from fabric.strategies.sharding.units import Units, uncompiled

Row = tuple[str, str, str]


def rows_of(module: Module, units: Units, checkpointed: Units | None, options: ShardingOptions) -> list[Row]:
    """Name, value and reason of each choice; before the model is sharded.

    Args:
        module: The user's model.
        units: What is sharded as a unit.
        checkpointed: What computes its activations again in backward.
        options: What `fully_shard` is told.
    """
    rows = [("sharded", f"{type(module).__name__}: {_describe_units(module, units)}", units.reason)]
    if units.tied:
        rows.append(("not apart", ", ".join(units.tied), "shares parameters with what is outside of it"))
    rows.append(("over", _describe_mesh(options.mesh), _describe_reshard(options.reshard_after_forward)))
    if checkpointed is not None:
        rows.append(("recomputed", str(checkpointed), "argument (activation_checkpointing_policy)"))
    if type(options.offload).__name__ == "CPUOffloadPolicy":
        rows.append(("kept in", "main memory", "argument (cpu_offload)"))
    policy = options.mixed_precision
    if policy.param_dtype is not None or policy.reduce_dtype is not None:
        reason = "precision" if options.with_autocast else "argument (mixed_precision)"
        rows.append(("gathered in", f"{_name(policy.param_dtype)}, reduced in {_name(policy.reduce_dtype)}", reason))
    return rows


def _describe_units(module: Module, units: Units) -> str:
    total = sum(parameter.numel() for parameter in module.parameters())
    parts = []
    for kind, count in units.kinds().items():
        sizes = [_numel(unit) for unit in units.modules.values() if type(uncompiled(unit)).__name__ == kind]
        each = f"{sizes[0]:,}" if len(set(sizes)) == 1 else f"{min(sizes):,} to {max(sizes):,}"
        parts.append(f"{count} x {kind} of {each}")
    inside = {id(p): p.numel() for unit in units.modules.values() for p in unit.parameters()}
    rest = total - sum(inside.values())
    return f"{' + '.join(parts)} + {rest:,} others" if parts else f"{total:,} parameters as one"


def _numel(module: Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _describe_mesh(mesh: Any) -> str:
    *copies, shards = mesh.shape
    ranks = f"{shards} rank" if shards == 1 else f"{shards} ranks"
    return ", ".join([ranks, *("1 copy" if count == 1 else f"{count} copies" for count in copies)])


def _describe_reshard(reshard: bool | int) -> str:
    if isinstance(reshard, bool):
        return "freed between forward and backward" if reshard else "kept whole between forward and backward"
    return f"over {reshard} ranks between forward and backward"


def _name(dtype: Any) -> str:
    return "their own dtype" if dtype is None else str(dtype).removeprefix("torch.")
