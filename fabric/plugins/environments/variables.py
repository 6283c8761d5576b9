# SPDX-License-Identifier: Apache-2.0
"""Reading the numbers that a launcher puts into variables."""

from collections.abc import Mapping


def read_required(environ: Mapping[str, str], name: str, *, whose: str) -> str:
    """The text of a variable that must be there.

    Args:
        environ: Where to look.
        name: The variable.
        whose: Who should have set it, for the error: `torchrun`.
    """
    value = environ.get(name, "").strip()
    if not value:
        raise RuntimeError(f"The variable `{name}` of {whose} is not set. Set `{name}`, or start the job with {whose}.")
    return value


def read_number(environ: Mapping[str, str], name: str, *, whose: str, minimum: int = 0) -> int:
    """The number in a variable that must be there."""
    return to_number(read_required(environ, name, whose=whose), name, minimum=minimum)


def read_optional_number(environ: Mapping[str, str], name: str, *, minimum: int = 0) -> int | None:
    """The number in a variable; None where it is unset or empty."""
    text = environ.get(name, "").strip()
    return to_number(text, name, minimum=minimum) if text else None


def to_number(text: str, name: str, *, minimum: int) -> int:
    """`text` as a number of at least `minimum`; `name` is the variable that it stands in."""
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"`{name}={text}` is not a number. Set `{name}` to a number of at least {minimum}.") from None
    if number < minimum:
        raise ValueError(f"`{name}={text}` is too small. Set `{name}` to a number of at least {minimum}.")
    return number


def validate_below(value: int, name: str, limit: int, limit_name: str) -> None:
    """Check that a rank is below the number that it counts towards."""
    if value >= limit:
        raise ValueError(
            f"`{name}={value}` contradicts `{limit_name}={limit}`: `{name}` counts from 0 to {limit - 1}."
            f" Correct one of the two variables."
        )
