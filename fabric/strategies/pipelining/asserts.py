# SPDX-License-Identifier: Apache-2.0
"""Telling a check from a decision: `assert x`, or `if x: raise ...`, from any other `if`."""

import dis
from types import FrameType

_BETWEEN = ("CACHE", "COMPARE_OP", "COPY", "EXTENDED_ARG", "NOT_TAKEN", "TO_BOOL")  # versions of Python differ in them


def goes_on_with(frame: FrameType) -> bool | None:
    """With which truth of the condition that is asked for right now a function goes on; None if with either.

    That is so where one of the two ways does nothing but to raise: the condition jumps over that.

    Args:
        frame: Where the condition stands.
    """
    rest = [each for each in dis.get_instructions(frame.f_code) if each.offset >= frame.f_lasti]
    rest = [each for each in rest if each.opname not in _BETWEEN]
    if not rest or "JUMP" not in rest[0].opname or not rest[0].opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    skipped = [each.opname for each in rest[1:] if each.offset < rest[0].argval]
    straight = not any(part in name for name in skipped for part in ("JUMP", "RETURN", "STORE"))
    if not skipped or skipped[-1] != "RAISE_VARARGS" or not straight:
        return None
    return rest[0].opname.endswith("IF_TRUE")
