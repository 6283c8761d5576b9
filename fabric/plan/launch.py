# SPDX-License-Identifier: Apache-2.0
"""How the ranks of this machine start, and how many threads each gets."""

from collections.abc import Mapping

from fabric.accelerators import Inventory
from fabric.plan.plan import Choice
from fabric.plugins.environments import ClusterEnvironment
from fabric.strategies import Strategy


def choose_launcher(
    strategy: Choice[Strategy], environment: ClusterEnvironment, inventory: Inventory, *, joins: bool = False
) -> Choice[str]:
    """The launcher's name; see `Plan.launcher`.

    Raises:
        ValueError: For several processes on Windows, or from a notebook by a start method that needs a script.
    """
    _validate_platform(environment.world_size(), inventory)
    if joins:
        return Choice("subprocess", "joins the ranks that this process has started before")
    if environment.creates_processes_externally:
        return Choice("external", f"started by {environment.started_by}")
    method = strategy.value.start_method
    local = environment.local_world_size()
    if method is None:
        return Choice("none", "one process: this one")
    if method == "subprocess" and local == 1:
        single = environment.world_size() == 1
        return Choice("none", "one process: this one" if single else "this is the only process of this machine")
    if inventory.interactive and local > 1 and not strategy.value.interactive_compatible:
        raise _needs_script(strategy, local)
    first = environment.node_rank() * local
    if method == "subprocess":
        ranks = _ranks(first + 1, first + local - 1)
        return Choice(method, f"starts {ranks} of this node; rank {first} is this process")
    return Choice(method, f"`launch(fn)` starts {_ranks(first, first + local - 1)} of this node")


def choose_threads(environ: Mapping[str, str], inventory: Inventory, *, local_world_size: int) -> Choice[int | None]:
    """Threads of each rank, so that the ranks of a machine do not fight for its cores."""
    chosen = environ.get("OMP_NUM_THREADS", "").strip()
    if chosen:
        return Choice(None, f"OMP_NUM_THREADS={chosen}", chosen)
    if local_world_size == 1:
        return Choice(None, "one local rank: PyTorch's own choice", "default")
    cores = inventory.cpu_cores
    return Choice(max(1, cores // local_world_size), f"auto: {cores} cores for {local_world_size} local ranks")


def _validate_platform(world_size: int, inventory: Inventory) -> None:
    if inventory.platform == "win32" and world_size > 1:
        raise ValueError(
            f"This plan needs {world_size} processes, but on Windows Fabric runs one."
            " Write `devices=1` and leave `num_nodes` out, or use the Windows Subsystem for Linux."
        )


def _needs_script(strategy: Choice[Strategy], local: int) -> ValueError:
    by_script = strategy.value.start_method == "subprocess"
    cause = "it runs a script again" if by_script else "its processes import `fn` from a file"
    return ValueError(
        f"`strategy={strategy}` ({strategy.reason}) cannot start {local} processes from a notebook or a prompt:"
        f' {cause}. Write `strategy="ddp_notebook"` and `fabric.launch(fn)`, or run a script.'
    )


def _ranks(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first}-{last}"
