# SPDX-License-Identifier: Apache-2.0
"""The ranks are processes that run a function: spawned, forked, or from a fork server."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import torch
from typing_extensions import override

from fabric.plugins.environments import ClusterEnvironment, LaunchedEnvironment, LocalEnvironment
from fabric.processes.child import Child
from fabric.processes.forks import in_forked_children
from fabric.processes.mailbox import Mailbox
from fabric.processes.main_thread import RankFailed
from fabric.processes.outside import Outcome, OutsideSupervisor
from fabric.processes.record import Records
from fabric.processes.screen import show
from fabric.processes.start import Job, Pipes
from fabric.processes.supervisor import read_grace
from fabric.processes.token import LaunchToken
from fabric.strategies.launchers.external import StartedRank
from fabric.strategies.launchers.job import job_in
from fabric.strategies.launchers.launcher import Launcher
from fabric.utilities.apply_func import move_data_to_device
from fabric.utilities.seed import give_seeding, take_seeding

T = TypeVar("T")


class MultiprocessingLauncher(Launcher):
    """Runs a function in new processes, and supervises them from this one, which is no rank.

    Args:
        start_method: `spawn`, `fork` or `forkserver`.
        environment: The cluster, as this process sees it.
        threads: Threads of each rank; None leaves them alone. A forked rank has one.
    """

    def __init__(self, start_method: str, *, environment: ClusterEnvironment, threads: int | None = None) -> None:
        self._start_method = start_method
        self._environment = environment
        self._threads = threads

    @override
    def launch(self, enter: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """See `Launcher.launch`. A result of any size comes back, with its tensors on the CPU.

        Raises:
            RankFailed: A rank failed. It is a `SystemExit` with that rank's exit code.
        """
        self._validate((enter, *args))
        grace = read_grace(os.environ)
        mailbox, records = Mailbox(), Records.create()
        pipes = Pipes(self._job(), mailbox=mailbox, records=records)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        try:
            children = self._start_all(pipes, sender, _Work(enter, args, kwargs, take_seeding()))
            pipes.close_given()
            sender.close()
            result = _Result(receiver)
            supervisor = OutsideSupervisor(
                children, mailbox=mailbox, records=records, grace=grace, shares_terminal=False
            )
            in_forked_children(supervisor.forget)
            outcome = supervisor.run()
        finally:
            pipes.close_kept()
            records.remove()
        mailbox.close()
        _raise_unless_well(outcome)
        return result.get()  # type: ignore[no-any-return]

    def _start_all(self, pipes: Pipes, sender: Connection, work: "_Work") -> list[Child]:
        children: list[Child] = []
        try:
            for local_rank in range(self._environment.local_world_size()):
                token = pipes.token(local_rank)
                result_to = sender if local_rank == 0 else None
                children.append(self._start(_Place.of(token, pipes, result_to), work))
        except BaseException:
            for child in children:
                child.send(signal.SIGKILL, group=True)
            raise
        return children

    def _start(self, place: "_Place", work: "_Work") -> Child:
        threads = 1 if self._start_method == "fork" else self._threads
        context: Any = multiprocessing.get_context(self._start_method)
        process = context.Process(target=_run_rank, args=(self._start_method, place, work, threads))
        try:
            with warnings.catch_warnings():
                # Python warns of forking beside threads; whoever chooses `fork` knows, and ranks stay at one thread.
                warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*use of fork.*")
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"`fabric.launch(fn)` by {self._start_method} sends `fn`, its arguments and the strategy to new"
                f" processes by pickling, which fails: {error}. Define the function at the top of a module, or fork:"
                ' `Fabric(strategy="ddp_fork")`.'
            ) from error
        finally:
            place.close()

        def join() -> int:
            process.join()
            return int(process.exitcode or 0)

        return Child(place.token.rank, process.pid or 0, join=join)

    def _job(self) -> Job:
        meets_here = isinstance(self._environment, LocalEnvironment)  # then rank 0 opens the store on a free port
        port = 0 if meets_here else self._environment.main_port
        return job_in(self._environment, launcher="the launching process", store_port=port)

    def _validate(self, functions: tuple[Any, ...]) -> None:
        if sys.platform == "win32":
            raise RuntimeError("`fabric.launch(fn)` starts one process on Windows. Write `devices=1`, or use WSL.")
        if self._start_method == "fork":
            self._validate_fork()
            return
        main = sys.modules["__main__"]
        typed_in = any(getattr(function, "__module__", None) == "__main__" for function in functions)
        if typed_in and getattr(main, "__file__", None) is None:
            raise RuntimeError(
                f"`fabric.launch(fn)` by {self._start_method} imports `fn` in new processes, which cannot see a"
                " function that was typed into a notebook or a prompt."
                ' Write `Fabric(strategy="ddp_notebook")`, or put the function into a module.'
            )

    def _validate_fork(self) -> None:
        if sys.platform == "darwin":
            raise RuntimeError(
                "`fabric.launch(fn)` cannot fork on macOS: its system libraries do not survive it."
                ' Put the code into a script and write `Fabric(strategy="ddp")` or `"ddp_spawn"`.'
            )
        if torch.cuda.is_initialized():
            raise RuntimeError(
                "`fabric.launch(fn)` cannot fork any more: CUDA is initialised in this process, and a fork could not"
                " use it. Restart the kernel and call `launch` before anything touches the GPU, or write"
                ' `Fabric(strategy="ddp_spawn")` in a script.'
            )


class _Work(NamedTuple):
    """What every rank calls."""

    enter: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seeding: dict[str, Any] | None


class _Place(NamedTuple):
    """A rank's token, and its descriptors in the form in which multiprocessing hands them over."""

    token: LaunchToken
    death: Connection
    control: Connection
    port: Connection | None
    result_to: Connection | None
    foreign: tuple[int, ...]

    @classmethod
    def of(cls, token: LaunchToken, pipes: Pipes, result_to: Connection | None) -> "_Place":
        def wrap(descriptor: int | None) -> Connection:
            return Connection(os.dup(descriptor if descriptor is not None else -1))

        return cls(
            token,
            death=wrap(token.death_fd),
            control=wrap(token.control_fd),
            port=wrap(token.port_fd) if token.port_fd is not None else None,
            result_to=result_to,
            foreign=pipes.foreign(token),
        )

    def close(self) -> None:
        """In the launcher: the rank has them now."""
        for connection in (self.death, self.control, self.port):
            if connection is not None:
                connection.close()

    def own_token(self, *, forked: bool) -> LaunchToken:
        """In the rank: the token, with the numbers that the descriptors have here."""
        for descriptor in self.foreign if forked else ():
            os.close(descriptor)
        return self.token._replace(
            death_fd=os.dup(self.death.fileno()),
            control_fd=os.dup(self.control.fileno()),
            port_fd=os.dup(self.port.fileno()) if self.port is not None else None,
        )


class _Result:
    """What rank 0 returns; a thread takes it off the pipe, so that rank 0 can end however large it is."""

    def __init__(self, receiver: Connection) -> None:
        self._receiver = receiver
        self._content: bytes | None = None
        self._thread = threading.Thread(target=self._receive, name="fabric-result", daemon=True)
        self._thread.start()

    def get(self) -> Any:
        self._thread.join()
        return pickle.loads(self._content) if self._content is not None else None

    def _receive(self) -> None:
        try:
            self._content = self._receiver.recv_bytes()
        except (EOFError, OSError):
            self._content = None
        finally:
            self._receiver.close()


def _run_rank(start_method: str, place: _Place, work: _Work, threads: int | None) -> None:
    """The whole life of a rank."""
    if threads is not None:
        torch.set_num_threads(threads)  # first: a fork of a process that has used OpenMP hangs with more than one
    give_seeding(work.seeding)
    os.setsid()
    token = place.own_token(forked=start_method == "fork")
    place.close()
    # As in a rank that is a program of its own, so that a second `Fabric` here finds its place. A fork server's ranks
    # are not the launcher's own children.
    os.environ.update(token._replace(launcher_pid=os.getppid()).to_environ())
    rank = StartedRank.begin(token)
    try:
        result = work.enter(LaunchedEnvironment(token), *work.args, **work.kwargs)
        if place.result_to is not None:
            place.result_to.send_bytes(_pickle(result))
    except SystemExit as error:
        if error.code:  # a failure, though not an exception: there is nothing to wait for
            rank.give_up()
        raise
    except Exception as error:
        sys.exit(rank.fail(error))
    except KeyboardInterrupt as error:
        rank.fail(error)
        sys.exit(128 + signal.SIGINT)
    finally:
        rank.finish()


def _pickle(result: Any) -> bytes:
    try:
        return pickle.dumps(move_data_to_device(result, torch.device("cpu")), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"`fabric.launch(fn)` returns what `fn` returned on rank 0 by pickling it, which fails for"
            f" `{type(result).__name__}`: {error}. Return numbers, tensors, or containers of them."
        ) from error


def _raise_unless_well(outcome: Outcome) -> None:
    if outcome.failure is not None:
        show(outcome.report())
        raise RankFailed(outcome.report(), outcome.code)
    if outcome.asked == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.code:
        raise SystemExit(outcome.code)
