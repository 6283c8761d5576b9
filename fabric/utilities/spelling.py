# SPDX-License-Identifier: Apache-2.0
"""The end of an error about an unknown name: the nearest spelling and the choices."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(name: object, choices: Iterable[str]) -> str:
    """`Did you mean 'cuda'? Choose one of 'auto', 'cpu', 'cuda'.`; the first sentence only where a choice is near.

    Args:
        name: What the user wrote.
        choices: Every name that is known, in the order in which the error lists them.
    """
    known = list(choices)
    near = get_close_matches(str(name).lower(), known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Choose one of {', '.join(map(repr, known))}."
