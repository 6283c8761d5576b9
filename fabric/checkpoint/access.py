# SPDX-License-Identifier: Apache-2.0
"""What saving and loading need of a strategy, and how ranks come to one mind about errors."""

import pickle
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torch.nn import Module
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fabric.checkpoint.background import BackgroundSaves

T = TypeVar("T")


class Ranks(Protocol):
    """How to reach the other ranks."""

    @property
    def checkpoint_group(self) -> "ProcessGroup | None": ...
    @property
    def world_size(self) -> int: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def is_global_zero(self) -> bool: ...
    def broadcast(self, obj: T, src: int = 0) -> T: ...
    def gather_objects(self, obj: T) -> list[T]: ...


class StateAccess(Ranks, Protocol):
    """How to reach the state of the parallel objects. Every `Strategy` is one."""

    saves: "BackgroundSaves"

    @property
    def state_dict_type(self) -> str: ...
    @property
    def state_is_distributed(self) -> bool: ...
    def create_cpu_group(self) -> "ProcessGroup | None": ...
    def get_module_state_dict(self, module: Module) -> dict[str, Any]: ...
    def load_module_state_dict(self, module: Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]: ...
    def load_optimizer_state(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None: ...
    def parameter_names(self, optimizer: Optimizer) -> list[list[str]] | None: ...
    def in_plain_order(self, names: list[str]) -> list[str]: ...


class Attempts:
    """Tries things that all ranks do in the same order, and keeps the first error.

    A rank on which something fails still does the rest, since the others may be waiting for it there. When all is done,
    `agree` raises that error on every rank.

    Example::

        attempts = Attempts()
        with attempts:
            read_a_file()
        attempts.agree(access)
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True

    def agree(self, access: Ranks, note: T | None = None) -> list[T | None]:
        """Raise the error of the lowest rank that has one, on every rank with the same type and text.

        Returns:
            What each rank noted, to spare whoever needs it another round.
        """
        answers = access.gather_objects((None if self.error is None else _report(self.error), note))
        failed = next((rank for rank, (report, _) in enumerate(answers) if report is not None), None)
        if failed is None:
            return [others for _, others in answers]
        report = answers[failed][0]
        assert report is not None
        if failed == access.global_rank and self.error is not None and report.faithful:
            raise self.error
        cause = self.error if failed == access.global_rank else RuntimeError(f"On rank {failed}:\n{report.traceback}")
        raise pickle.loads(report.error) from cause


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note(note)`, which is new in Python 3.11; an error takes its notes along when it is pickled."""
    vars(error).setdefault("__notes__", []).append(note)


class _Report(NamedTuple):
    error: bytes
    faithful: bool
    traceback: str


def _report(error: Exception) -> _Report:
    """The error in a form that travels; one that can't be pickled becomes a `RuntimeError` that says the same."""
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        copied = pickle.loads(pickled)
        faithful = type(copied) is type(error) and str(copied) == str(error)
    except Exception:
        faithful = False
    if not faithful:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            add_note(plain, note)
        pickled = pickle.dumps(plain)
    return _Report(pickled, faithful, text)
