# SPDX-License-Identifier: Apache-2.0
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import MAX_RANKS, RanksError, pool_pids, run_ranks

pytestmark = pytest.mark.ranks


def mean(context, values):
    context.process_group()
    total = torch.tensor(values[context.rank])
    dist.all_reduce(total)
    return total.item() / context.world_size


def pid(context):
    return os.getpid()


def threads(context):
    return torch.get_num_threads(), os.getcwd() == str(context.directory), list(context.directory.glob("*"))


def raise_on(context, rank):
    context.process_group()
    if context.rank == rank:
        raise ValueError(f"the reason on rank {context.rank}")
    dist.barrier()


def raise_in_turn(context):
    time.sleep(0.2 * (context.world_size - context.rank))
    raise ValueError(f"the reason on rank {context.rank}")


def hang(context):
    context.process_group()
    if context.rank == 0:
        dist.barrier()
    sleep_for_ever()


def sleep_for_ever():
    while True:
        time.sleep(1)


def leave(context, rank):
    if context.rank == rank:
        os._exit(17)


def set_variable(context):
    os.environ["LEAKED"] = "1"


def two_groups(context):
    context.process_group()
    dist.barrier()
    dist.destroy_process_group()
    return mean(context, [1.0, 2.0])


def return_lambda(context):
    return lambda: None


@pytest.mark.parametrize("n", [1, 2, MAX_RANKS])
def test_results_come_in_rank_order_from_a_real_group(n):
    values = [float(rank * rank) for rank in range(n)]
    assert run_ranks(n, mean, values) == [sum(values) / n] * n


def test_the_pool_is_warm():
    first = run_ranks(2, pid)
    start = time.perf_counter()
    assert run_ranks(2, pid) == first
    assert run_ranks(2, mean, [1.0, 3.0]) == [2.0, 2.0]
    assert time.perf_counter() - start < 2  # about 0.03 s on a quiet machine


def test_each_call_starts_from_one_state():
    assert run_ranks(2, threads)[1][:2] == (1, True)


def test_a_call_can_join_several_groups_in_turn():
    assert run_ranks(2, two_groups) == [1.5, 1.5]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_raised_comes_last_and_the_ranks_are_replaced(rank):
    before = run_ranks(2, pid)
    with pytest.raises(RanksError) as caught:
        run_ranks(2, raise_on, rank)
    text = str(caught.value)
    assert text.startswith(f"Rank {rank} of 2 failed first (last below).\n\n")
    assert text.endswith(f"ValueError: the reason on rank {rank}\n")
    assert "in raise_on" in text
    assert text.index(f"rank {1 - rank} of 2") < text.index(f"rank {rank} of 2 failed:")
    assert list(caught.value.failures) == [1 - rank, rank]
    assert not set(run_ranks(2, pid)) & set(before)


def test_the_first_of_several_failures_comes_last():
    with pytest.raises(RanksError) as caught:
        run_ranks(3, raise_in_turn)
    assert list(caught.value.failures) == [0, 1, 2]
    assert str(caught.value).endswith("ValueError: the reason on rank 2\n")


def test_ranks_that_hang_are_killed_and_show_where_they_stood():
    before = run_ranks(2, pid)
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(2, hang, timeout=1)
    assert time.monotonic() - start < 10
    assert caught.value.timed_out
    assert str(caught.value).startswith("The ranks did not finish in time.\n\n")
    assert "in barrier" in caught.value.failures[0]
    assert "in sleep_for_ever" in caught.value.failures[1]
    for old in before:
        wait_until_gone(old)
    assert run_ranks(2, mean, [1.0, 3.0]) == [2.0, 2.0]


def test_a_rank_that_dies_is_named():
    with pytest.raises(RanksError) as caught:
        run_ranks(2, leave, 1)
    assert str(caught.value) == (
        "Rank 1 of 2 failed first (last below).\n\nrank 0 of 2 returned None\n\n\n"
        "rank 1 of 2 failed:\nThe process ended without a word (killed, or `os._exit`).\n"
    )


def test_a_rank_that_changes_its_environment_fails():
    with pytest.raises(RanksError, match=r"rank 0 changed os.environ: \{'LEAKED': \(None, '1'\)\}"):
        run_ranks(1, set_variable)


def test_a_result_that_cannot_travel_fails():
    with pytest.raises(RanksError, match="return_lambda"):
        run_ranks(1, return_lambda)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"^`run_ranks\(5, ...\)`: the pool has 1 to 4 ranks.$"):
        run_ranks(5, pid)
    with pytest.raises(ValueError, match=r"^`run_ranks` needs a module-level function, and `.*<lambda>` is none.$"):
        run_ranks(1, lambda context: None)


def test_pids_are_known():
    assert set(run_ranks(2, pid)) <= pool_pids()


def wait_until_gone(process):
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
