# SPDX-License-Identifier: Apache-2.0
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from fabric import Fabric
from tests.ranks import run_ranks


def at_once(context):
    fabric = context.fabric(strategy="ddp")
    last = context.rank == context.world_size - 1
    flags = (last, torch.tensor([last]), np.bool_(last), True, False)
    return [(fabric.any_rank(flag), fabric.all_ranks(flag)) for flag in flags]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_get_one_answer(ranks):
    assert run_ranks(ranks, at_once) == [[(True, False)] * 3 + [(True, True), (False, False)]] * ranks


def test_one_process_answers_itself():
    fabric = Fabric(accelerator="cpu", devices=1)
    assert [fabric.any_rank(flag) for flag in (False, True)] == [False, True]
    assert [fabric.all_ranks(flag) for flag in (False, True)] == [False, True]
    assert [fabric.any_rank(flag, wait=False) for flag in (True, False, False)] == [False, True, False]
    assert [fabric.all_ranks(flag, wait=False) for flag in (False, True, True)] == [True, False, True]


def overlapped(context):
    fabric = context.fabric(strategy="ddp")
    seen = []
    for step in range(4):
        now = step == context.rank
        seen.append((fabric.any_rank(now, wait=False), fabric.all_ranks(step != 1, wait=False), fabric.any_rank(now)))
    return seen  # two votes are left, which nobody waits for


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_without_waiting_the_answer_is_that_of_the_call_before(ranks):
    voted = [step < ranks for step in range(4)]
    expected = list(zip([False, *voted[:3]], [True, True, False, True], voted, strict=True))
    assert run_ranks(ranks, overlapped) == [expected] * ranks


def stopping(context, reason):
    """Steps that each rank takes until all leave the loop; rank 1 has a reason to after its third one."""
    fabric = context.fabric(strategy="ddp")
    model, optimizer = fabric.setup(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    for step in range(1, 20):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum()
        fabric.backward(loss)
        optimizer.step()
        here = step == 3 and context.rank == 1
        if reason == "SIGTERM" and here:
            os.kill(os.getpid(), signal.SIGTERM)
        flags = {"SIGTERM": bool(asked), "NaN": (loss * (float("nan") if here else 1)).isnan(), "early": here}
        if fabric.any_rank(flags[reason], wait=False):
            break
    signal.signal(signal.SIGTERM, before)
    fabric.teardown()
    return step


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "reason"), [(2, "SIGTERM"), (4, "NaN"), (2, "early")])
def test_all_ranks_stop_one_step_later_together(ranks, reason):
    assert run_ranks(ranks, stopping, reason) == [4] * ranks


SCRIPT = """
import time
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
for step in range(3):
    time.sleep(0.3 * fabric.global_rank)
    if fabric.any_rank(step == fabric.global_rank, wait=False):
        break
print(f"rank {fabric.global_rank} left at step {step}")
"""


@pytest.mark.ranks
def test_a_vote_that_is_left_does_not_disturb_the_end(tmp_path):
    (tmp_path / "main.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "error", "main.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["rank 0 left at step 1", "rank 1 left at step 1"]


def test_votes_of_another_launch_are_forgotten():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.any_rank(True, wait=False)
    fabric.teardown()
    assert fabric.any_rank(False, wait=False) is False


def test_what_is_no_flag():
    fabric = Fabric(accelerator="cpu", devices=1)
    text = "`fabric.any_rank(flag)` takes a bool or a tensor with one element, but got `function`."
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        fabric.any_rank(at_once)
    text = (
        "`fabric.all_ranks(flag)` takes one yes or no, and this tensor has the shape (2,)."
        " Reduce it first, for example with `.any()`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        fabric.all_ranks(torch.ones(2))
