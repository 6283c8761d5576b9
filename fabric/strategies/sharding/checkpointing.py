# SPDX-License-Identifier: Apache-2.0
"""Activations that are computed again in backward instead of being kept."""

from torch.nn import Module

from fabric.strategies.sharding.units import uncompiled


def checkpoint_activations(modules: list[Module]) -> None:
    """Let modules compute their activations again in backward. Neither their names nor their classes change.

    Args:
        modules: Of those inside of another the outer one does it for both.

    Raises:
        ValueError: If one is compiled in place.
    """
    # The only way of PyTorch's that leaves the model's structure alone; it lies in a private package. A wrapper module
    # would take the place of the user's blocks.
    from torch.distributed._composable.checkpoint_activation import checkpoint

    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    for module in modules:
        if id(module) in inside:
            continue
        if uncompiled(module)._compiled_call_impl is not None:
            raise ValueError(
                f"`activation_checkpointing_policy` matches a `{type(module).__name__}` that is compiled in place, with"
                " the hooks that would do it. Write `blocks[i] = torch.compile(blocks[i])` in place of"
                " `blocks[i].compile()`."
            )
        checkpoint(module)
