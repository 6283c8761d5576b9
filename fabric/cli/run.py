# SPDX-License-Identifier: Apache-2.0
"""`fabric run`: a script, or a module, on the devices that the command line names."""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fabric.processes.child import Child
from fabric.processes.command import Command
from fabric.processes.mailbox import Mailbox
from fabric.processes.outside import OutsideSupervisor
from fabric.processes.record import Records
from fabric.processes.screen import show
from fabric.processes.start import Job, Pipes, start_rank
from fabric.processes.supervisor import read_grace

# The options, their values and their meaning. Each becomes `FABRIC_<NAME>` for the script, if it was given.
_OPTIONS = {
    "accelerator": ("KIND", "kind of device: cpu, cuda, gpu, mps, auto"),
    "strategy": ("NAME", "how the processes work together: ddp, ddp_spawn, dp, ..."),
    "devices": ("DEVICES", "how many devices (2), which ones (0,2), or all of them (-1, auto)"),
    "num-nodes": ("N", "number of machines; run the command on each of them"),
    "node-rank": ("N", "number of this machine, from 0"),
    "main-address": ("HOST", "host of machine 0"),
    "main-port": ("PORT", "a free port on machine 0, the same for all machines"),
    "precision": ("NAME", "32-true, 16-mixed, bf16-mixed, bf16-true, ..."),
}
# Where one of these is set, a cluster has something to say about the processes, and the script listens to it.
_CLUSTER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"),
    *("FABRIC_NODE_RANK", "FABRIC_MAIN_ADDRESS", "FABRIC_MAIN_PORT"),
)
_EPILOG = """\
The script runs as `python main.py` does; what you give here is as good as an argument of `Fabric(...)`, and where the
two contradict each other, that is an error. With several devices on this machine all processes start at once, and this
command watches them: if one fails, all end, its traceback comes last, and its exit code is the command's.

  fabric run --devices 2 main.py --lr 0.1
  fabric run --devices 4 --precision bf16-mixed -m package.train
  fabric run --num-nodes 2 --node-rank 0 --main-address host0 --main-port 29400 --devices 8 main.py
"""


@dataclass(frozen=True)
class _Request:
    """What the command line asks for.

    Args:
        program: `main.py`, or `-m` and a module's name.
        arguments: The program's own arguments.
        variables: `FABRIC_*` variables for the options that were given.
    """

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    variables: dict[str, str]


def add_run_command(commands: Any) -> argparse.ArgumentParser:
    """Describe `fabric run` to the parser of `fabric`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="run a script on the devices of this machine, or of several",
        usage="fabric run [options] main.py [arguments]\n       fabric run [options] -m module [arguments]",
        description="Run a script, or a module, with Fabric's choices made on the command line.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, (metavar, meaning) in _OPTIONS.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=meaning)
    parser.add_argument("--debug", action="store_true", help="check the ranks at each collective, and values for NaN")
    parser.add_argument("-m", metavar="module", dest="module", help="run a module, as `python -m module` does")
    return parser


def run(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Carry out `fabric run`.

    Args:
        parser: What `add_run_command` made.
        words: The words after `fabric run`.

    Returns:
        The exit code of the script, or of the rank that failed first.
    """
    request = _parse(parser, words)
    environ = {**os.environ, **request.variables}
    command = Command((sys.executable, *request.program, *request.arguments), os.getcwd())
    count = _local_ranks(environ)
    if count is None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execve(command.words[0], command.words, environ)
    try:
        grace = read_grace(environ)
    except ValueError as error:
        parser.error(str(error))
    return _run_ranks(command, count, environ, grace)


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> _Request:
    """Split the words at the program: what follows it is the script's, whatever it looks like."""
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] not in ("-", "--"):
        if words[end] == "-m":
            break
        takes_value = words[end].removeprefix("--") in _OPTIONS
        end += 2 if takes_value else 1
    options = parser.parse_args(list(words[:end]))
    rest = list(words[end:])
    if rest[:1] == ["--"]:
        rest = rest[1:]
    is_module = rest[:1] == ["-m"]
    program = tuple(rest[: 2 if is_module else 1])
    if len(program) < (2 if is_module else 1):
        parser.error("which script? Write `fabric run [options] main.py [arguments]`, or `-m module`.")
    if not is_module and not os.path.exists(program[0]):
        parser.error(f"there is no file `{program[0]}` in `{os.getcwd()}`.")
    given = {name: getattr(options, name.replace("-", "_")) for name in _OPTIONS}
    given["debug"] = "1" if options.debug else None
    return _Request(
        program,
        arguments=tuple(rest[len(program) :]),
        variables={_variable(name): value for name, value in given.items() if value is not None},
    )


def _variable(option: str) -> str:
    return f"FABRIC_{option.replace('-', '_').upper()}"


def _local_ranks(environ: Mapping[str, str]) -> int | None:
    """How many ranks to start here; None where the script itself is to find out, or to start them."""
    strategy = environ.get("FABRIC_STRATEGY", "").lower()
    starts_its_own = strategy == "dp" or strategy.endswith(("_spawn", "_fork", "_forkserver", "_notebook"))
    several_machines = environ.get("FABRIC_NUM_NODES", "1").strip() not in ("", "1", "auto")
    in_cluster = any(environ.get(name) for name in _CLUSTER)
    if starts_its_own or several_machines or in_cluster or sys.platform == "win32":
        return None
    count = _count_devices(environ.get("FABRIC_DEVICES", ""))
    return count if count > 1 else None


def _count_devices(devices: str) -> int:
    """The number of devices that `2`, `0,2` or `[0, 2]` stand for; 0 where it takes the machine to know it."""
    text = devices.strip().strip("[]")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        return 0
    if "," in text or devices.strip().startswith("["):
        return len(parts)
    return int(parts[0]) if parts else 0


def _run_ranks(command: Command, count: int, environ: Mapping[str, str], grace: float) -> int:
    mailbox, records = Mailbox(), Records.create()
    job = Job(
        launcher="fabric run",
        cluster="local",
        node_rank=0,
        first_rank=0,
        world_size=count,
        local_world_size=count,
        store_host="127.0.0.1",
        store_port=0,
    )
    pipes = Pipes(job, mailbox=mailbox, records=records)
    children = _start(command, pipes, count, environ, _threads(count, environ))
    pipes.close_given()
    supervisor = OutsideSupervisor(children, mailbox=mailbox, records=records, grace=grace, shares_terminal=True)
    outcome = supervisor.run()
    if outcome.report():
        show(outcome.report())
    return outcome.code


def _start(command: Command, pipes: Pipes, count: int, environ: Mapping[str, str], threads: int | None) -> list[Child]:
    children: list[Child] = []
    try:
        for rank in range(count):
            token = pipes.token(rank)
            child = start_rank(command, token, environ=environ, threads=threads, at_terminal=rank == 0)
            children.append(child)
    except BaseException:
        for child in children:
            child.send(signal.SIGKILL, group=True)
        raise
    return children


def _threads(count: int, environ: Mapping[str, str]) -> int | None:
    """Threads of each rank, so that they do not fight for the cores; None where the user has said it."""
    if environ.get("OMP_NUM_THREADS"):
        return None
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, cores // count)
