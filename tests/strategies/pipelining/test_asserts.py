# SPDX-License-Identifier: Apache-2.0
"""What Python is about to do with a truth value, read off the caller's bytecode."""

import inspect

import pytest

from fabric.strategies.pipelining.asserts import goes_on_with
from tests.strategies.pipelining.asserting import compared, plain_assert, with_a_message


class Asked:
    """Notes with which truth the one who asks goes on."""

    def __init__(self, truth):
        self.noted = []
        self.truth = truth

    def __bool__(self):
        self.noted.append(goes_on_with(inspect.currentframe().f_back))
        return self.truth

    def __le__(self, other):
        return self


def guarded(value, text="it"):
    if value <= 3:
        raise ValueError(f"{text} is {3!r}")
    return 1


def by_hand(value):
    if not value:
        raise AssertionError("by hand")


def condition(value):
    if value <= 3:
        return 1
    return 2


def more_than_raising(value):
    if value:
        text = "something"
        raise ValueError(text)


def one_of_two(value):
    if value and len(value.noted) > 1:
        raise ValueError


def called(value):
    return bool(value)


def looped(value):
    while value:
        break


GO_ON = {plain_assert: True, compared: True, with_a_message: True, by_hand: True, guarded: False}
GO_ON |= dict.fromkeys((condition, more_than_raising, one_of_two, called, looped))


@pytest.mark.parametrize("function", GO_ON, ids=lambda function: function.__name__)
def test_a_check_is_told_from_a_decision(function):
    asked = Asked(truth=function is not guarded and function is not more_than_raising)
    function(asked)
    assert asked.noted[0] is GO_ON[function]
