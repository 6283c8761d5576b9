# SPDX-License-Identifier: Apache-2.0
"""Real ranks for tests: `run_ranks(2, function, ...)` calls a module-level function on warm processes, over gloo.

The ranks are forked from one process that has imported torch once (the nursery) and serve every test of the session.
A test that fails or hangs costs its ranks, which are then replaced; no test ever sees the ruins of another one.

    def mean(context, x):
        context.process_group()
        total = torch.tensor(x[context.rank])
        torch.distributed.all_reduce(total)
        return total.item() / context.world_size

    assert run_ranks(2, mean, [1.0, 3.0]) == [2.0, 2.0]
"""

import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric import Fabric
    from fabric.plugins.environments import ClusterEnvironment

MAX_RANKS = 4
START_TIMEOUT = 120.0  # seconds for the nursery to import torch, once a session
MANY_THREADS = 20  # of a rank, which is then replaced
GRACE = 1.0  # seconds that the other ranks have to tell their part after the first failure
# A rank is described by its context alone; what a job around pytest set must not leak in.
CLUSTER_PREFIXES = ("FABRIC_", "TORCHELASTIC_", "SLURM_", "GROUP_", "ROLE_")
CLUSTER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


class RanksError(AssertionError):
    """At least one rank failed. The text holds every rank's traceback, the first failing one last.

    Attributes:
        failures: For each rank that did not succeed, its traceback; in the order in which the text shows them.
        timed_out: Whether the time limit ended the call.
    """

    def __init__(self, message: str, failures: dict[int, str], *, timed_out: bool) -> None:
        super().__init__(message)
        self.failures = failures
        self.timed_out = timed_out


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
    """Call `function(context, *args, **kwargs)` on `n` ranks at once and return what each returned, in rank order.

    Args:
        n: Number of ranks, 1 to 4. They are real processes even for 1.
        function: A module-level function; it, the arguments and the results travel by pickle.
        timeout: Seconds after which the ranks are killed and the call fails.

    Raises:
        RanksError: If a rank raised, died or did not finish in time.
    """
    return _pool().run(n, function, args, kwargs, timeout)


def pool_pids() -> set[int]:
    """The process ids that belong to the pool, for whoever looks for leaked processes."""
    return _POOLS[0].pids() if _POOLS else set()


# --------------------------------------------------------------------------------------------------------------------
# What the test's function gets
# --------------------------------------------------------------------------------------------------------------------
@dataclass
class RankContext:
    """The place of one rank in the call.

    Attributes:
        rank: Global (and local) rank.
        world_size: Number of ranks.
        directory: A fresh directory that all ranks of this call share; it is also their working directory.
    """

    rank: int
    world_size: int
    directory: Path
    _environment: "ClusterEnvironment | None" = field(default=None, repr=False)
    _fabrics: "list[Fabric]" = field(default_factory=list, repr=False)

    @property
    def environment(self) -> "ClusterEnvironment":
        """A cluster in which every rank is already a process, which meets through a file in `directory`."""
        if self._environment is None:
            from tests.environment import RanksEnvironment

            self._environment = RanksEnvironment(self)
        return self._environment

    def fabric(self, **kwargs: Any) -> "Fabric":
        """A launched `Fabric` on the CPU with one device per rank; `kwargs` go to its constructor."""
        from fabric import Fabric

        plugins = kwargs.pop("plugins", None) or []
        plugins = [*plugins] if isinstance(plugins, (list, tuple)) else [plugins]
        kwargs = {"accelerator": "cpu", "devices": self.world_size, **kwargs}
        fabric = Fabric(plugins=[self.environment, *plugins], **kwargs)
        fabric.launch()
        self._fabrics.append(fabric)
        return fabric

    def teardown(self) -> None:
        """Leave what the fabrics of this call have joined: the threads of a group would wait for ever."""
        for fabric in reversed(self._fabrics):
            fabric.teardown()

    def create_store(self, timeout: timedelta = timedelta(seconds=60)) -> Any:
        """A `FileStore` under a name that no earlier store of this call had."""
        from torch.distributed import FileStore

        self._stores = getattr(self, "_stores", -1) + 1
        store = FileStore(str(self.directory / f".store-{self._stores}"), self.world_size)
        store.set_timeout(timeout)
        return store

    def process_group(self, backend: str = "gloo") -> None:
        """Join the default process group, for tests of what needs nothing but torch.distributed."""
        import torch.distributed as dist

        dist.init_process_group(backend, store=self.create_store(), rank=self.rank, world_size=self.world_size)
        dist.barrier()  # a rank that left at once would break the connections that the others still make


# --------------------------------------------------------------------------------------------------------------------
# The pytest side
# --------------------------------------------------------------------------------------------------------------------
@dataclass
class _Rank:
    pid: int
    connection: Connection


@dataclass
class _Outcome:
    """What one rank said: a result, or the moment and the traceback of its failure."""

    rank: int
    result: Any = None
    failed_at: float | None = None
    text: str = ""


def _count_threads(pid: int) -> int:
    """Each group that a call left behind, such as those of a mesh of its own, keeps threads that poll."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # no Linux
        return 0


class _Pool:
    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._directory / "socket"))
        self._listener.listen(MAX_RANKS)
        self._listener.settimeout(START_TIMEOUT)
        self._ranks: list[_Rank] = []
        self._calls = 0
        environ = {k: v for k, v in os.environ.items() if k not in CLUSTER_NAMES and not k.startswith(CLUSTER_PREFIXES)}
        environ["OMP_NUM_THREADS"] = "1"
        root = Path(__file__).resolve().parents[1]
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", "from tests.ranks import _nursery_main; _nursery_main()", str(self._directory)],
            stdin=subprocess.PIPE,
            env=environ,
            cwd=root,
        )
        self._owner = os.getpid()
        atexit.register(self.close)

    def pids(self) -> set[int]:
        return {self._nursery.pid, *(rank.pid for rank in self._ranks)}

    def run(self, n: int, function: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> list[Any]:
        if not 1 <= n <= MAX_RANKS:
            raise ValueError(f"`run_ranks({n}, ...)`: the pool has 1 to {MAX_RANKS} ranks.")
        if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
            raise ValueError(f"`run_ranks` needs a module-level function, and `{function.__qualname__}` is none.")
        self._fill(n)
        self._calls += 1
        directory = self._directory / f"call-{self._calls}"
        directory.mkdir()
        try:
            outcomes = self._exchange(n, (function, args, kwargs), directory, time.monotonic() + timeout)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        missing = [rank for rank in range(n) if rank not in outcomes]
        if missing or any(o.failed_at is not None for o in outcomes.values()):
            raise AssertionError("unreachable: `_exchange` returns successes only")
        if any(_count_threads(rank.pid) > MANY_THREADS for rank in self._ranks):
            self._discard(len(self._ranks))
        return [outcomes[rank].result for rank in range(n)]

    def _fill(self, n: int) -> None:
        """Fork the ranks that are missing and wait until each has reported."""
        assert self._nursery.stdin is not None
        missing = n - len(self._ranks)
        self._nursery.stdin.write(b"\n" * max(0, missing))
        self._nursery.stdin.flush()
        for _ in range(missing):
            accepted, _ = self._listener.accept()
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            self._ranks.append(_Rank(connection.recv(), connection))

    def _exchange(self, n: int, call: Any, directory: Path, deadline: float) -> dict[int, _Outcome]:
        """Hand the call to each rank and collect what they say, until all have spoken or time is up."""
        payload = pickle.dumps(call)
        pending = {}
        for rank in range(n):
            connection = self._ranks[rank].connection
            connection.send((rank, n, str(directory), list(sys.path)))
            connection.send_bytes(payload)
            pending[connection] = rank
        outcomes: dict[int, _Outcome] = {}
        failed = timed_out = False
        while pending and not timed_out:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = pending.pop(connection)
                outcomes[rank] = _receive(connection, rank)
                if outcomes[rank].failed_at is not None and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE)
            timed_out = not ready
        if failed or timed_out:
            stacks = self._stacks(list(pending.values()), directory)
            self._discard(n)
            raise _failure(n, outcomes, stacks, timed_out=timed_out and not failed)
        return outcomes

    def _stacks(self, ranks: list[int], directory: Path) -> dict[int, str]:
        """Where each of `ranks` stands right now; works inside a collective too."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[rank].pid, signal.SIGUSR1)
        time.sleep(0.2 if ranks else 0)
        files = {rank: directory / f".stack-{rank}" for rank in ranks}
        return {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}

    def _discard(self, n: int) -> None:
        """Kill the first `n` ranks with all that they started; the next call forks new ones."""
        for rank in self._ranks[:n]:
            rank.connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        del self._ranks[:n]

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child of pytest runs our atexit too
            return
        self._discard(len(self._ranks))
        self._listener.close()
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        self._nursery.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


_POOLS: list[_Pool] = []


def _pool() -> _Pool:
    if not _POOLS:
        _POOLS.append(_Pool())
    return _POOLS[0]


def _receive(connection: Connection, rank: int) -> _Outcome:
    try:
        outcome: _Outcome = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        text = "The process ended without a word (killed, or `os._exit`).\n"
        return _Outcome(rank, failed_at=time.monotonic(), text=text)
    return outcome


def _failure(n: int, outcomes: dict[int, _Outcome], stacks: dict[int, str], *, timed_out: bool) -> RanksError:
    """One error that tells every rank's part, the first failing rank's last."""
    texts = {o.rank: f"rank {o.rank} of {n} returned {o.result!r}\n" for o in outcomes.values() if o.failed_at is None}
    shown = {rank: f"rank {rank} of {n} was still running:\n{stack}" for rank, stack in sorted(stacks.items())}
    raised = sorted((o for o in outcomes.values() if o.failed_at is not None), key=lambda o: -(o.failed_at or 0))
    shown |= {o.rank: f"rank {o.rank} of {n} failed:\n{o.text}" for o in raised}
    texts |= shown
    head = "The ranks did not finish in time."
    if not timed_out:
        head = f"Rank {raised[-1].rank} of {n} failed first (last below)."
    return RanksError("\n\n".join([head, *texts.values()]), shown, timed_out=timed_out)


# --------------------------------------------------------------------------------------------------------------------
# The nursery: a process that has imported torch and forks ranks, one for each byte on its stdin
# --------------------------------------------------------------------------------------------------------------------
def _nursery_main() -> None:
    _preload()
    gc.freeze()  # a rank's collections, one after each call, then pass over what the nursery has imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead ranks are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes our stdin
    children = []
    while sys.stdin.buffer.raw.read(1):  # type: ignore[attr-defined]
        pid = os.fork()
        if pid == 0:
            _rank_main(Path(sys.argv[1]))
        children.append(pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _preload() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytest  # noqa: F401
        import torch._dynamo  # (DDP imports it; here it costs its seconds once)
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.pipelining
        import torch.distributed.tensor.experimental  # noqa: F401

        with contextlib.suppress(ImportError):  # a broken import shows in the test, with its traceback
            import fabric.fabric  # noqa: F401


def _rank_main(directory: Path) -> None:
    """Serve calls until pytest closes the connection. Never returns."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is (deprecated|not supported)")
    connection = Client(str(directory / "socket"), family="AF_UNIX")
    connection.send(os.getpid())
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            _serve(connection)
    os._exit(0)


def _serve(connection: Connection) -> None:
    rank, world_size, directory, path = connection.recv()
    payload = connection.recv_bytes()
    sys.path[:] = path
    os.chdir(directory)
    context = RankContext(rank, world_size, Path(directory))
    with open(f".stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        try:
            outcome = pickle.dumps(_Outcome(rank, result=_call(context, payload)))
        except BaseException:
            failed_at = time.monotonic()
            outcome = pickle.dumps(_Outcome(rank, failed_at=failed_at, text=traceback.format_exc()))
        connection.send_bytes(outcome)
        faulthandler.unregister(signal.SIGUSR1)
    os.chdir("/")


def _call(context: RankContext, payload: bytes) -> Any:
    """Run the function from one known state, and leave that state again.

    The group is left after a success only: closing it after a failure would make the peers' vaguer error come first.
    """
    import torch
    import torch.distributed as dist

    environ = dict(os.environ)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    function, args, kwargs = pickle.loads(payload)
    result = function(context, *args, **kwargs)
    context.teardown()
    gc.collect()  # models hold groups too, and are cycles
    if dist.is_initialized():
        dist.destroy_process_group()
    if dict(os.environ) != environ:
        raise AssertionError(f"rank {context.rank} changed os.environ: {_difference(environ, dict(os.environ))}")
    if torch.get_default_dtype() != torch.float32 or not torch.is_grad_enabled():
        raise AssertionError(f"rank {context.rank} left torch's default dtype or gradient mode changed")
    return result


def _difference(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    names = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
