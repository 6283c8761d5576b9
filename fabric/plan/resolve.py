# SPDX-License-Identifier: Apache-2.0
"""From what was said, what the cluster says and what the machine has, to a plan."""

from collections.abc import Mapping

from fabric.accelerators import Accelerator, Inventory
from fabric.plan.arguments import Arguments
from fabric.plan.debug import choose_debug
from fabric.plan.kinds import (
    auto_strategy,
    choose_accelerator,
    choose_precision,
    create_strategy,
    find_strategy,
    validate_accelerator_of,
)
from fabric.plan.launch import choose_launcher, choose_threads
from fabric.plan.layout import Layout, choose_layout
from fabric.plan.plan import Choice, Plan
from fabric.plan.plugins import sort_plugins
from fabric.plugins.environments import ClusterEnvironment, LaunchedEnvironment, detect_environment
from fabric.plugins.io import CheckpointIO
from fabric.processes.token import LaunchToken
from fabric.strategies import Strategy


def resolve(
    arguments: Arguments,
    environ: Mapping[str, str],
    inventory: Inventory,
    launched: ClusterEnvironment | None = None,
) -> Plan:
    """Decide what runs. A pure function: it starts nothing, writes nothing and initialises no device.

    Arguments and the `FABRIC_*` variables of `fabric run` are explicit and must agree with each other and with the
    cluster; the cluster, then the machine, fill in what nobody said.

    Args:
        arguments: What the user said to `Fabric(...)`.
        environ: The environment of this process.
        inventory: What the machine has; see `take_inventory`.
        launched: The job that this process has started before, which a second `Fabric` joins.

    Raises:
        TypeError: For an argument of the wrong type.
        ValueError: For an unknown name, a contradiction, or a choice that this machine or strategy does not support.
        RuntimeError: For a cluster of which a variable is missing.
    """
    plugins = sort_plugins(arguments.plugins)
    environment = _choose_environment(plugins.environment, environ, inventory, launched)
    accelerator = choose_accelerator(arguments, environ, inventory)
    said = find_strategy(arguments, environ)
    strategy = create_strategy(said) if said else None
    layout = choose_layout(
        arguments,
        environ,
        environment=environment.value,
        accelerator=accelerator.value,
        strategy=strategy,
        inventory=inventory,
    )
    strategy = strategy or _auto_strategy(layout, inventory)
    validate_accelerator_of(strategy, accelerator)
    precision = choose_precision(
        arguments,
        environ,
        plugin=plugins.precision,
        strategy=strategy.value,
        device_type=_device_type(accelerator.value, layout),
    )
    return Plan(
        accelerator=accelerator,
        devices=layout.devices,
        num_nodes=layout.num_nodes,
        strategy=strategy,
        precision=precision,
        launcher=choose_launcher(strategy, layout.environment, inventory, joins=launched is not None),
        environment=Choice(layout.environment, environment.reason, layout.environment.name),
        threads=choose_threads(environ, inventory, local_world_size=layout.environment.local_world_size()),
        checkpoint_io=_checkpoint_io(plugins.checkpoint_io),
        debug=choose_debug(environ),
    )


def _choose_environment(
    plugin: ClusterEnvironment | None,
    environ: Mapping[str, str],
    inventory: Inventory,
    launched: ClusterEnvironment | None,
) -> Choice[ClusterEnvironment]:
    """A process of a job of ours knows its place; else the user's own environment; else what the variables say."""
    if launched is not None:
        return Choice(launched, "this process has launched before")
    token = LaunchToken.from_environ(environ, parent_pid=inventory.parent_pid)
    if token is not None:
        started = LaunchedEnvironment(token)
        if plugin is not None and plugin.creates_processes_externally:
            raise ValueError(
                f"`Fabric(plugins={type(plugin).__name__}(...))` says that every process is started from outside, but"
                f" this one was started by {started.started_by}. Leave the plugin out, or start the script without"
                " Fabric."
            )
        return Choice(started, f"started by {started.started_by}")
    if plugin is not None:
        return Choice(plugin, "argument (plugins)")
    environment = detect_environment(environ)
    return Choice(environment, f"auto: {environment.evidence}")


def _auto_strategy(layout: Layout, inventory: Inventory) -> Choice[Strategy]:
    forks = inventory.interactive and not layout.environment.creates_processes_externally
    return auto_strategy(layout.environment.world_size(), forks=forks)


def _device_type(accelerator: Accelerator, layout: Layout) -> str:
    return accelerator.get_parallel_devices(layout.devices.value)[0].type


def _checkpoint_io(plugin: CheckpointIO | None) -> Choice[CheckpointIO | None]:
    if plugin is None:
        return Choice(None, "the strategy's own", "default")
    return Choice(plugin, "argument (plugins)", type(plugin).__name__)
