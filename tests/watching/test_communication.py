# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest

from fabric.watching.communication import Communication, communication_of, communication_table


def _event(name, start, end, *, device="CPU", annotation=False, children=()):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=f"DeviceType.{device}",
        is_user_annotation=annotation,
        cpu_children=list(children),
    )


def test_exposed_is_the_time_in_which_nothing_else_was_done() -> None:
    events = [
        _event("ProfilerStep*", 0, 50, annotation=True, children=["x"]),
        _event("ProfilerStep*", 50, 100, annotation=True, children=["x"]),
        _event("mine", 0, 100, annotation=True),  # brackets others
        _event("aten::outer", 5, 90, children=["aten::mm"]),  # the call inside of it counts
        _event("aten::mm", 5, 20),
        _event("c10d::allreduce_", 9, 11),
        _event("gloo:all_reduce", 10, 30),
        _event("gloo:all_reduce", 25, 40),
        _event("aten::mul", 35, 37),
        _event("gloo:barrier", 60, 70),
    ]
    assert communication_of(events) == Communication(
        recorded=100,
        steps=2,
        busy=40,  # 10 to 40, and 60 to 70
        exposed=40 - 10 - 2,
        collectives={"gloo:all_reduce": (2, 35), "gloo:barrier": (1, 10)},
    )
    assert communication_of(events).share == 0.28


def test_on_a_gpu_its_own_time_line_counts() -> None:
    events = [
        _event("ProfilerStep*", 0, 100, annotation=True),
        _event("nccl:all_reduce", 0, 90),  # the CPU waits
        _event("aten::mm", 0, 90),  # the CPU launches
        _event("nccl:all_reduce", 20, 40, device="CUDA", annotation=True),
        _event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, device="CUDA"),
        _event("sgemm", 10, 30, device="CUDA"),
        _event("ProfilerStep*", 0, 100, device="CUDA", annotation=True),
    ]
    found = communication_of(events)
    assert (found.steps, found.busy, found.exposed) == (1, 20, 10)
    assert found.collectives == {"nccl:all_reduce": (1, 20)}


@pytest.mark.parametrize("events", [[], [_event("aten::mm", 0, 10)]])
def test_none(events) -> None:
    found = communication_of(events)
    assert (found.busy, found.exposed, found.share, found.collectives) == (0, 0, 0, {})


def test_the_table() -> None:
    ranks = [
        Communication(10000.0, 2, 3000.0, 2500.0, {"gloo:barrier": (1, 500.0), "gloo:all_reduce": (4, 2500.0)}),
        Communication(10000.0, 2, 0.0, 0.0),
    ]
    assert communication_table(ranks).splitlines() == [
        "rank  steps     recorded  collectives  nothing else   share",
        "   0      2     10.00 ms      3.00 ms       2.50 ms   25.0%",
        "   1      2     10.00 ms      0.00 ms       0.00 ms    0.0%",
        "  gloo:all_reduce: 4 calls, 2.50 ms (rank 0)",
        "  gloo:barrier: 1 call, 0.50 ms (rank 0)",
    ]
