# SPDX-License-Identifier: Apache-2.0
"""Which accelerator, which strategy, which precision: names, instances and "auto"."""

from collections.abc import Mapping

from fabric.accelerators import ACCELERATORS, Accelerator, CPUAccelerator, CUDAAccelerator, Inventory, MPSAccelerator
from fabric.plan.arguments import Arguments, Said, describe, find_said
from fabric.plan.plan import Choice
from fabric.plugins.precision import Precision, canonical_precision
from fabric.strategies import STRATEGIES, Strategy
from fabric.utilities.spelling import suggest


def choose_accelerator(arguments: Arguments, environ: Mapping[str, str], inventory: Inventory) -> Choice[Accelerator]:
    """The accelerator that the user said, else a GPU that is there, else the CPU."""

    def normalise(value: object, text: str) -> Accelerator:
        return _find_accelerator(value, text, environ, inventory)

    said = find_said(
        "accelerator",
        arguments.accelerator,
        environ,
        normalise=normalise,
        agree=lambda one, other: one.name == other.name,
    )
    if said is not None:
        return Choice(said.value, said.reason, said.value.name)
    gpu = _find_gpu(inventory)
    if gpu is not None:
        return Choice(gpu, f"auto: {count_devices(gpu.count_devices(inventory), gpu)} visible", gpu.name)
    return Choice(CPUAccelerator(), "auto: no GPU visible", CPUAccelerator.name)


def find_strategy(arguments: Arguments, environ: Mapping[str, str]) -> Said[str | Strategy] | None:
    """The strategy that the user said, by name or as an instance."""
    return find_said("strategy", arguments.strategy, environ, normalise=_validate_strategy, agree=_same_strategy)


def create_strategy(said: Said[str | Strategy]) -> Choice[Strategy]:
    """The strategy itself; a name becomes a new one."""
    if isinstance(said.value, Strategy):
        return Choice(said.value, said.reason, type(said.value).__name__)
    return Choice(STRATEGIES[said.value](), said.reason, said.value)


def auto_strategy(world_size: int, *, forks: bool) -> Choice[Strategy]:
    """The strategy where nobody said one.

    Args:
        world_size: Processes of the whole job.
        forks: Whether this is a notebook whose ranks are still to be started.
    """
    if world_size == 1:
        return Choice(STRATEGIES["single_device"](), "auto: one process", "single_device")
    if forks:
        return Choice(STRATEGIES["ddp_fork"](), f"auto: {world_size} processes, from a notebook", "ddp_fork")
    return Choice(STRATEGIES["ddp"](), f"auto: {world_size} processes", "ddp")


def validate_accelerator_of(strategy: Choice[Strategy], accelerator: Choice[Accelerator]) -> None:
    """Check that the strategy runs on this accelerator."""
    takes = strategy.value.accelerators
    if takes is not None and accelerator.value.name not in takes:
        raise ValueError(
            f"`strategy={strategy}` ({strategy.reason}) runs on {' or '.join(takes)}, but the accelerator is"
            f" `{accelerator}` ({accelerator.reason}). Choose another strategy, such as `ddp`, or another accelerator."
        )


def choose_precision(
    arguments: Arguments,
    environ: Mapping[str, str],
    *,
    plugin: Precision | None,
    strategy: Strategy,
    device_type: str,
) -> Choice[Precision]:
    """The precision of this name, as the strategy makes it, or the user's own object."""
    said = find_said("precision", arguments.precision, environ, normalise=_validate_precision)
    if plugin is not None:
        _validate_precision_plugin(plugin, said, device_type)
        return Choice(plugin, "argument (plugins)", plugin.precision)
    name, reason = (said.value, said.reason) if said else ("32-true", "default")
    return Choice(strategy.create_precision(name, device_type), reason, name)


def _validate_precision(value: object, text: str) -> str:
    if not isinstance(value, (str, int)):
        raise TypeError(
            f"`{text}` is of type `{type(value).__name__}`. Write a name such as 'bf16-mixed', or pass a `Precision`"
            " instance in `plugins=`."
        )
    return canonical_precision(value)


def _validate_precision_plugin(plugin: Precision, said: Said[str] | None, device_type: str) -> None:
    if plugin.device not in (None, device_type):
        raise ValueError(
            f"`Fabric(plugins={describe(plugin)})` was made for `{plugin.device}`, but the devices are `{device_type}`."
            f" Make it with `device={device_type!r}`."
        )
    if said is None or (said.origin != "argument" and said.value == plugin.precision):
        return
    raise ValueError(
        f"`Fabric(plugins={describe(plugin)})` and `{said.text}` both choose a precision. Leave one of them out."
    )


def _find_accelerator(value: object, text: str, environ: Mapping[str, str], inventory: Inventory) -> Accelerator:
    if isinstance(value, Accelerator):
        accelerator = value
    elif not isinstance(value, str):
        raise TypeError(
            f"`{text}` is of type `{type(value).__name__}`."
            f" Write a name such as 'cpu', 'gpu' or 'cuda', or pass an `Accelerator` instance."
        )
    elif value == "gpu":
        accelerator = _find_gpu(inventory) or CUDAAccelerator()
    elif value in ACCELERATORS:
        accelerator = ACCELERATORS[value]()
    else:
        names = sorted(["auto", "gpu", *ACCELERATORS])
        raise ValueError(f"`{text}` is not a known accelerator. {suggest(value, names)}")
    if accelerator.count_devices(inventory) == 0:
        raise _unavailable(accelerator, value, text, environ)
    return accelerator


def _unavailable(accelerator: Accelerator, value: object, text: str, environ: Mapping[str, str]) -> ValueError:
    kind = "CUDA or MPS" if value == "gpu" else accelerator.name.upper()
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    cause = f" (`CUDA_VISIBLE_DEVICES={hidden}`)" if hidden is not None and accelerator.name == "cuda" else ""
    return ValueError(
        f"`{text}` is not available: this process sees no {kind} device{cause}."
        f' Write `accelerator="cpu"`, or `accelerator="auto"` to take what is there.'
    )


def _find_gpu(inventory: Inventory) -> Accelerator | None:
    for kind in (CUDAAccelerator, MPSAccelerator):
        if kind.count_devices(inventory) > 0:
            return kind()
    return None


def count_devices(number: int, accelerator: Accelerator) -> str:
    """`4 CUDA devices`, for reasons and errors."""
    return f"{number} {accelerator.name.upper()} device{'s' if number > 1 else ''}"


def _validate_strategy(value: object, text: str) -> str | Strategy:
    if isinstance(value, Strategy):
        return value
    if isinstance(value, type) and issubclass(value, Strategy):
        raise TypeError(f"`{text}` is a class. Pass an instance: `strategy={value.__name__}(...)`.")
    if not isinstance(value, str):
        raise TypeError(
            f"`{text}` is of type `{type(value).__name__}`. Write a name such as 'ddp', or pass a `Strategy` instance."
        )
    if value not in STRATEGIES:
        raise ValueError(f"`{text}` is not a known strategy. {suggest(value, sorted(['auto', *STRATEGIES]))}")
    return value


def _same_strategy(one: str | Strategy, other: str | Strategy) -> bool:
    """One name twice, or an instance and the name of its class that starts its ranks in the same way."""
    if isinstance(one, str) or isinstance(other, Strategy):
        return one == other
    return STRATEGIES.stands_for(other, type(one)) and STRATEGIES[other]().start_method == one.start_method
