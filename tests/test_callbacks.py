# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from fabric.callbacks import Callbacks


class Counter:
    def __init__(self):
        self.count = 0

    def on_step(self, by=1):
        self.count += by

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Silent:
    pass


def test_hooks_are_called_on_those_that_have_them():
    counter = Counter()
    Callbacks([Silent(), counter]).call("on_step", by=3)
    assert counter.count == 3


def test_states_go_by_class_and_not_by_place():
    class Other(Counter):
        pass

    first, second, other = Counter(), Counter(), Other()
    first.count, second.count, other.count = 1, 2, 3
    state = Callbacks([first, second, Silent(), other]).state_dict()
    assert state == {"Counter": {"count": 1}, "Counter-1": {"count": 2}, "Other": {"count": 3}}
    new = [Other(), Counter(), Counter()]
    Callbacks(new).load_state_dict(state)
    assert [callback.count for callback in new] == [3, 1, 2]


def test_other_callbacks_than_before_warn_and_the_rest_is_restored():
    counter = Counter()
    text = (
        "The checkpoint holds the state of the callbacks ['Counter', 'Gone'], and this run has ['Counter']."
        " Only those in both are restored."
    )
    with pytest.warns(UserWarning, match=re.escape(text)):
        Callbacks([counter]).load_state_dict({"Counter": {"count": 5}, "Gone": {}})
    assert counter.count == 5
