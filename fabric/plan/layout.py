# SPDX-License-Identifier: Apache-2.0
"""How many processes on how many machines, on which devices."""

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from fabric.accelerators import Accelerator, Inventory
from fabric.plan.arguments import Arguments, Said, find_said, parse_num_nodes
from fabric.plan.kinds import count_devices
from fabric.plan.plan import Choice
from fabric.plugins.environments import ClusterEnvironment, Fact, Sizes
from fabric.strategies import Strategy
from fabric.utilities.device_parser import DeviceSpec, parse_devices


class Layout(NamedTuple):
    """The shape of the job, as this machine sees it."""

    devices: Choice[tuple[int, ...]]
    num_nodes: Choice[int]
    environment: ClusterEnvironment


class _Known(NamedTuple):
    """What is known before the shape is decided: what the user said, what the cluster says, what the machine has."""

    devices: Said[tuple[int, ...]] | None
    num_nodes: Said[int] | None
    sizes: Sizes
    external: bool
    accelerator: Accelerator
    inventory: Inventory


def choose_layout(
    arguments: Arguments,
    environ: Mapping[str, str],
    *,
    environment: ClusterEnvironment,
    accelerator: Accelerator,
    strategy: Choice[Strategy] | None,
    inventory: Inventory,
) -> Layout:
    """Devices, machines, and the environment that knows both.

    What the user said must agree with what the cluster says; where one is silent the other decides; where both are,
    the machine does: all GPUs, or one process on the CPU.

    Args:
        arguments: What the user said to `Fabric(...)`.
        environ: What the user said to `fabric run`.
        environment: The cluster.
        accelerator: The kind of device.
        strategy: The strategy that the user said; None where it follows from the number of processes.
        inventory: The machine.
    """
    known = _Known(
        devices=_find_devices(arguments, environ, accelerator, inventory),
        num_nodes=find_said("num_nodes", arguments.num_nodes, environ, normalise=parse_num_nodes),
        sizes=environment.sizes(),
        external=environment.creates_processes_externally,
        accelerator=accelerator,
        inventory=inventory,
    )
    if strategy is not None and not strategy.value.one_process_per_device:
        return _one_process(known, environment, strategy)
    devices = _devices_of_processes(known)
    num_nodes = _machines(known, devices)
    sized = environment.sized(local_world_size=len(devices.value), num_nodes=num_nodes.value if num_nodes else None)
    return Layout(devices, num_nodes or Choice(sized.num_nodes(), "auto: one machine"), sized)


def _find_devices(
    arguments: Arguments, environ: Mapping[str, str], accelerator: Accelerator, inventory: Inventory
) -> Said[tuple[int, ...]] | None:
    def normalise(value: object, text: str) -> tuple[int, ...]:
        spec: DeviceSpec = parse_devices(value, said=text)
        return accelerator.select_devices(spec, inventory=inventory, said=text)

    return find_said("devices", arguments.devices, environ, normalise=normalise)


def _one_process(known: _Known, environment: ClusterEnvironment, strategy: Choice[Strategy]) -> Layout:
    """One process for the whole job, on one device or on several."""
    facts = [known.sizes.world_size, known.sizes.local_world_size, known.sizes.num_nodes]
    if known.num_nodes is not None:
        facts.append(Fact(known.num_nodes.value, f"`{known.num_nodes.text}`"))
    for fact in facts:
        if fact is not None and fact.value > 1:
            raise ValueError(
                f"`strategy={strategy}` ({strategy.reason}) runs in one process, but {fact.source} asks for more."
                ' Choose a strategy for several processes, such as `strategy="ddp"`.'
            )
    devices = _devices_of_one_process(known, strategy)
    return Layout(devices, Choice(1, "one process"), environment.sized(local_world_size=1, num_nodes=1))


def _devices_of_one_process(known: _Known, strategy: Choice[Strategy]) -> Choice[tuple[int, ...]]:
    limit = strategy.value.max_devices
    if known.devices is None:
        every = _every_device(known)
        if limit is None or len(every.value) <= limit:
            return every
        return Choice(every.value[:limit], f"auto: `{strategy}` takes {limit}", str(limit))
    if limit is not None and len(known.devices.value) > limit:
        raise ValueError(
            f"`{known.devices.text}` asks for {len(known.devices.value)} devices, but `strategy={strategy}`"
            f" ({strategy.reason}) takes at most {limit}. Write `devices={limit}`, or choose a strategy for several"
            ' devices, such as `strategy="ddp"`.'
        )
    return _device_choice(known.devices.value, known.devices.reason)


def _devices_of_processes(known: _Known) -> Choice[tuple[int, ...]]:
    """The devices of this machine, one for each of its processes."""
    fact = _local_processes(known)
    if known.devices is not None:
        if fact is not None and fact.value != len(known.devices.value):
            _contradict(known.devices, "devices", len(known.devices.value), fact, "process(es) on this machine")
        return _device_choice(known.devices.value, known.devices.reason)
    if fact is not None:
        return _device_choice(_devices_of_fact(known, fact), fact.source)
    return _every_device(known)


def _devices_of_fact(known: _Known, fact: Fact) -> tuple[int, ...]:
    try:
        return known.accelerator.select_devices(fact.value, inventory=known.inventory, said=fact.source)
    except ValueError:
        there = count_devices(known.accelerator.count_devices(known.inventory), known.accelerator)
        raise ValueError(
            f"{fact.source} means {fact.value} processes on this machine, each with a device of its own, but this"
            f' process sees {there}. Start fewer processes on each machine, or write `accelerator="cpu"`.'
        ) from None


def _local_processes(known: _Known) -> Fact | None:
    """What the cluster says about the number of processes on this machine."""
    total = known.sizes.world_size
    if known.sizes.local_world_size is not None or total is None:
        return known.sizes.local_world_size
    if known.num_nodes is not None:
        machines = known.num_nodes.value
        if total.value % machines:
            raise ValueError(
                f"{total.source} cannot be divided by `{known.num_nodes.text}`: every machine must run the same number"
                " of processes. Correct one of the two."
            )
        return Fact(total.value // machines, f"{total.source} over {known.num_nodes.text}")
    return total if known.external and known.devices is None else None


def _machines(known: _Known, devices: Choice[tuple[int, ...]]) -> Choice[int] | None:
    """The number of machines; None where neither user nor cluster says one."""
    fact = known.sizes.num_nodes or _machines_from_total(known.sizes.world_size, devices, known.accelerator)
    if known.num_nodes is not None:
        if fact is not None and fact.value != known.num_nodes.value:
            _contradict(known.num_nodes, "num_nodes", known.num_nodes.value, fact, "machine(s)")
        return Choice(known.num_nodes.value, known.num_nodes.reason)
    return None if fact is None else Choice(fact.value, fact.source)


def _machines_from_total(total: Fact | None, devices: Choice[tuple[int, ...]], accelerator: Accelerator) -> Fact | None:
    if total is None:
        return None
    local = len(devices.value)
    if total.value % local:
        raise ValueError(
            f"{total.source} cannot be divided by the {count_devices(local, accelerator)} of this machine"
            f" ({devices.reason}). Make `WORLD_SIZE` the number of processes on all machines together, or write"
            " `devices=` for the number on each."
        )
    source, _, cluster = total.source.partition(" (")
    detail = f"{source} over {local} local device{'s' if local > 1 else ''}"
    return Fact(total.value // local, f"{detail} ({cluster}" if cluster else detail)


def _contradict(said: Said[tuple[int, ...]] | Said[int], name: str, wanted: int, fact: Fact, what: str) -> NoReturn:
    raise ValueError(
        f"{said} asks for {wanted} {what}, but there are {fact.value}: {fact.source}."
        f" Leave `{name}` out, or make the two equal."
    )


def _every_device(known: _Known) -> Choice[tuple[int, ...]]:
    selected = known.accelerator.select_devices(None, inventory=known.inventory, said='devices="auto"')
    if known.accelerator.name == "cpu":
        return _device_choice(selected, "auto: one process on the CPU")
    return _device_choice(selected, f"auto: {count_devices(len(selected), known.accelerator)} visible")


def _device_choice(indices: tuple[int, ...], reason: str) -> Choice[tuple[int, ...]]:
    """Shows the number of devices, and which they are where they are not simply the first ones."""
    first = indices == tuple(range(len(indices)))
    label = str(len(indices)) if first else f"{len(indices)} ({','.join(map(str, indices))})"
    return Choice(indices, reason, label)
