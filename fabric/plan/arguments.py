# SPDX-License-Identifier: Apache-2.0
"""What the user said: the constructor's arguments and the options of `fabric run`, which are both explicit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from fabric.accelerators import Accelerator
from fabric.strategies import Strategy

T = TypeVar("T")


class Arguments(NamedTuple):
    """The arguments of `Fabric(...)`, with its defaults. "auto" and None count as not said."""

    accelerator: str | Accelerator | None = "auto"
    strategy: str | Strategy | None = "auto"
    devices: int | str | Sequence[int] | None = "auto"
    num_nodes: int | str | None = "auto"
    precision: str | int | None = None
    plugins: Any = None


@dataclass(frozen=True)
class Said(Generic[T]):
    """One thing that the user said.

    Args:
        value: Its value, brought into one form.
        text: How it was written: `devices=4` or `FABRIC_DEVICES=4`.
        origin: Where: `argument` or `fabric run`.
    """

    value: T
    text: str
    origin: str

    @property
    def reason(self) -> str:
        """`argument` or `FABRIC_DEVICES=4 (fabric run)`, for `explain()`."""
        return self.origin if self.origin == "argument" else f"{self.text} ({self.origin})"

    def __str__(self) -> str:
        """How an error names it."""
        return f"`{self.text}` ({self.origin})"


def find_said(
    name: str,
    value: object,
    environ: Mapping[str, str],
    *,
    normalise: Callable[[Any, str], T],
    agree: Callable[[T, T], bool] = lambda one, other: one == other,
) -> Said[T] | None:
    """What argument and `FABRIC_*` variable say about `name`; None where neither says anything.

    Args:
        name: The argument, such as `devices`.
        value: Its value.
        environ: Where to look for the variable.
        normalise: Brings a value into one form, or raises; its second argument is how the user wrote it.
        agree: Whether two such forms mean the same.

    Raises:
        ValueError: Where both say something, and not the same.
    """
    variable = f"FABRIC_{name.upper()}"
    flag_value = environ.get(variable, "").strip()
    argument = flag = None
    if _is_said(value):
        text = f"{name}={describe(value)}"
        argument = Said(normalise(value, text), text, "argument")
    if flag_value and _is_said(flag_value):
        text = f"{variable}={flag_value}"
        flag = Said(normalise(flag_value, text), text, "fabric run")
    if argument and flag and not agree(argument.value, flag.value):
        option = f"--{name.replace('_', '-')}"
        raise ValueError(
            f"`Fabric({argument.text})` contradicts `{flag.text}` (fabric run {option})."
            f" Leave one of them out, or make them equal."
        )
    return argument or flag


def describe(value: object) -> str:
    """How the user would write `value`: a literal, or the name of the class of an object."""
    if isinstance(value, type):
        return value.__name__
    if value is None or isinstance(value, (str, int, float, list, tuple)):
        return repr(value)
    return f"{type(value).__name__}(...)"


def parse_num_nodes(value: object, text: str) -> int:
    """The number of machines in `value`; `text` is how the user wrote it."""
    usage = "Write a number of machines of at least 1."
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"`{text}` is of type `{type(value).__name__}`. {usage}")
    if isinstance(value, str):
        raise ValueError(f"`{text}` is not a number. {usage}")
    if value < 1:
        raise ValueError(f"`{text}` is too small. {usage}")
    return value


def _is_said(value: object) -> bool:
    return value is not None and not (isinstance(value, str) and value == "auto")
