# SPDX-License-Identifier: Apache-2.0
"""Saving while the loop goes on: the state is copied, and a thread of each rank writes the copy.

The threads talk over a process group of their own, since the order of what is sent over the training's own group would
depend on which thread comes first.
"""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from weakref import ref

import torch.distributed as dist

from fabric.checkpoint.access import Attempts, Ranks, StateAccess
from fabric.checkpoint.copies import Buffers, Copies
from fabric.utilities.types import PathLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Busy = Literal["wait", "raise"]
Write = Callable[[Ranks, Attempts], None]


class SaveHandle:
    """A checkpoint that is being written, or has been.

    Args:
        path: Where to.

    Example::

        handle = fabric.save("checkpoint.pt", state, blocking=False)
        ...
        handle.result()  # it is there, or an error says why not
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        self.error: BaseException | None = None
        self.is_told = False  # whether somebody was given the error
        self._thread: threading.Thread | None = None
        self._is_wanted = False
        self._begin = threading.Event()
        self._end = threading.Event()

    def done(self) -> bool:
        """Whether nothing is left to do: the checkpoint is complete, on all ranks, or has failed."""
        return self._end.is_set()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            timeout: The most seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: If it is not complete by then; the writing goes on.
            Exception: What went wrong, the same on all ranks. The checkpoint that was there before is untouched.
        """
        if not self._end.wait(timeout):
            raise TimeoutError(
                f"`{self.path}` is not written completely after {timeout:g} s, and writing goes on. Ask again later."
            )
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            self.is_told = True
            raise self.error

    def wait(self) -> None:
        """Wait until nothing is left to do, whether it went well or not."""
        self._end.wait()
        if self._thread is not None:
            self._thread.join()

    def _complete(self) -> "SaveHandle":
        self._end.set()
        return self

    def _prepare(self, write: Write, ranks: Ranks) -> None:
        """Start the thread, which waits for `_go`. It is no daemon: Python's end waits for it."""
        thread = threading.Thread(target=self._run, args=(write, ranks), name="fabric-save")
        thread.start()
        self._thread = thread

    def _go(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._begin.set()
        if self._thread is None:
            self._end.set()

    def _run(self, write: Write, ranks: Ranks) -> None:
        self._begin.wait()
        try:
            if self._is_wanted:
                write(ranks, Attempts())
        except BaseException as error:
            self.error = error
        finally:
            self._end.set()


class BackgroundSaves:
    """The saves of a strategy that go on beside its loop: one at a time."""

    def __init__(self) -> None:
        self._end = _End()
        self._buffers = Buffers()
        self._group: ref[ProcessGroup] | None = None  # weakly: leaving the default group shall end it
        self._tells = False
        atexit.register(self._end.fail)  # before the launcher's handlers, so it runs after them

    def settle(self, access: StateAccess, busy: Busy = "wait") -> None:
        """Make sure that nothing is being written, and that an error of the last save was heard. Collective.

        Args:
            access: The strategy.
            busy: What to do where the last save is still being written: wait for it, or raise.

        Raises:
            RuntimeError: If it is still being written and must not be waited for; on all ranks.
            Exception: The error of the last save, unless each rank has got it from the handle.
        """
        last = self._end.last
        if last is None:
            return
        if busy == "raise" and not all(access.gather_objects(last.done())):
            raise RuntimeError(
                f"`fabric.save(..., busy='raise')`: `{last.path}` is still being written. Wait for the handle's"
                " `result()`, or leave out `busy`."
            )
        last.wait()
        self._end.last = None
        told = access.gather_objects(last.error is None or last.is_told)
        last.is_told = True
        if not all(told):
            attempts = Attempts()
            attempts.error = _as_exception(last.error)
            attempts.agree(access)

    def copies(self) -> Copies:
        """What copies a state, into the memory of the last copy. Only after `settle`."""
        return Copies(self._buffers)

    def start(self, path: PathLike, write: Write, access: StateAccess, attempts: Attempts) -> SaveHandle:
        """Write in a thread on each rank. Collective.

        Args:
            path: Where to, for errors.
            write: Writes a copy; called on all ranks with how to reach the others, and raises the same error on all.
            access: The strategy.
            attempts: Errors until now; all ranks raise the first one, and nothing is written.
        """
        handle = SaveHandle(path)
        is_wanted = False
        try:
            group = self._group_of(access)
            with attempts:
                handle._prepare(write, _OwnGroup(access.world_size, access.global_rank, group))
            attempts.agree(access)
            is_wanted = True
        finally:
            handle._go(is_wanted)
        self._end.last = handle
        if not self._tells:
            self._tells = True
            atexit.register(self._end.tell)  # after the launcher's, so it runs before: they look for an error
            _before_executors_end(self._end.wait)
        return handle

    def close(self) -> None:
        """Wait for the last save, and forget its memory.

        Raises:
            Exception: Its error, unless somebody has got it from the handle.
        """
        last, self._end.last = self._end.last, None
        self._buffers = Buffers()
        if last is None:
            return
        last.wait()
        if last.error is not None and not last.is_told:
            last.is_told = True
            raise last.error

    def _group_of(self, access: StateAccess) -> "ProcessGroup | None":
        group = None if self._group is None else self._group()
        if group is None:
            group = access.create_cpu_group()
            self._group = None if group is None else ref(group)
        return group


class _End:
    """What the end of the script looks at. By then the strategy may be gone, as that of a function's own `Fabric`."""

    def __init__(self) -> None:
        self.last: SaveHandle | None = None
        self._has_failed = False

    def wait(self) -> None:
        """Wait for a last save."""
        if self.last is not None:
            self.last.wait()

    def tell(self) -> None:
        """Report the error of a last save as one that nobody caught. Python has waited for the thread by then."""
        last = self.last
        if last is None or last.error is None or last.is_told:
            return
        last.is_told = self._has_failed = True
        sys.last_value = last.error
        sys.excepthook(type(last.error), last.error, last.error.__traceback__)

    def fail(self) -> None:
        """Python's exit code does not depend on what happens in its exit handlers."""
        if self._has_failed:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _before_executors_end(function: Callable[[], None]) -> None:
    """At Python's end executors refuse work before threads are waited for; S3 needs one to look up a host's name."""
    import_module("concurrent.futures.thread")  # registers its own end, and the last registered is called first
    # Private, as nothing public comes so early. Without it such a save fails, and the script says so.
    register = getattr(threading, "_register_atexit", None)
    with suppress(RuntimeError):  # Python is ending already
        register(function) if register is not None else None


def finished(path: PathLike) -> SaveHandle:
    """The handle of a save that nobody has to wait for."""
    return SaveHandle(path)._complete()


class _OwnGroup(NamedTuple):
    """The ranks as the writing threads reach them."""

    world_size: int
    global_rank: int
    checkpoint_group: "ProcessGroup | None"

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self.checkpoint_group is None:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self.checkpoint_group)
        return box[0]

    def gather_objects(self, obj: T) -> list[T]:
        if self.checkpoint_group is None:
            return [obj]
        objects: list[Any] = [None] * self.world_size
        dist.all_gather_object(objects, obj, group=self.checkpoint_group)
        return objects


def _as_exception(error: BaseException | None) -> Exception | None:
    if error is None or isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
