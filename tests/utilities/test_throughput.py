# SPDX-License-Identifier: Apache-2.0
import math
import re

import pytest
import torch

from fabric import Fabric
from fabric.loggers import Logger
from fabric.utilities.throughput import Throughput, ThroughputMonitor, get_available_flops, measure_flops
from tests.ranks import run_ranks


class _Rows(Logger):
    name, version = "rows", 0

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        pass


def test_rates_are_those_between_the_oldest_and_the_newest_reading_of_the_window() -> None:
    throughput = Throughput(available_flops=1000, window_size=3)
    assert throughput.compute() == {}
    readings = [(1.0, 1, 8, 80, 7), (2.0, 2, 16, 100, 100), (4.0, 3, 20, 120, 200), (6.0, 10, 56, 420, 300)]
    throughput.update(time=1.0, batches=1, samples=8, lengths=80, flops=7)
    assert throughput.compute() == {"time": 1.0, "batches": 1, "samples": 8, "lengths": 80}
    for time, batches, samples, lengths, flops in readings[1:]:
        throughput.update(time=time, batches=batches, samples=samples, lengths=lengths, flops=flops)
    assert throughput.compute() == {
        "time": 6.0,
        "batches": 10,
        "samples": 56,
        "lengths": 420,
        "device/batches_per_sec": 2.0,
        "device/samples_per_sec": 10.0,
        "device/items_per_sec": 80.0,
        "device/flops_per_sec": 125.0,
        "device/mfu": 0.125,
    }
    throughput.reset()
    assert throughput.compute() == {}
    throughput.update(time=0.0, batches=0, samples=0)


def test_several_devices_and_another_separator() -> None:
    throughput = Throughput(world_size=4, separator=".")
    for step in (1, 2):
        throughput.update(time=step, batches=step, samples=3 * step)
    metrics = throughput.compute()
    assert (metrics["device.samples_per_sec"], metrics["samples_per_sec"], metrics["batches_per_sec"]) == (3, 12, 4)


def test_no_rate_in_no_time() -> None:
    throughput = Throughput()
    for _ in range(2):
        throughput.update(time=1.0, batches=1, samples=1)
    assert throughput.compute() == {"time": 1.0, "batches": 1, "samples": 1}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"time": 2.0, "batches": 1, "samples": 1},
            {"time": 1.0, "batches": 2, "samples": 2},
            "`Throughput.update(...)` got `time=1.0` after `time=2.0`. Pass what has come together since the start,"
            " which does not fall; call `reset()` to start anew.",
        ),
        (
            {"time": 1.0, "batches": 1, "samples": 8},
            {"time": 2.0, "batches": 2, "samples": 7},
            "`Throughput.update(...)` got `samples=7` after `samples=8`. Pass what has come together since the start,"
            " which does not fall; call `reset()` to start anew.",
        ),
        (
            {"time": 1.0, "batches": 1, "samples": 1, "flops": 5},
            {"time": 2.0, "batches": 2, "samples": 2},
            "`Throughput.update(...)` got `flops` at some calls and not at others. Pass it at every call.",
        ),
        (
            {"time": 1.0, "batches": 1, "samples": 1},
            {"time": 2.0, "batches": 9, "samples": 4},
            "`Throughput.update(...)` got `samples=4` and `batches=9`, but a batch has a sample at least."
            " Pass the numbers since the start, not those of the last batch.",
        ),
    ],
)
def test_numbers_that_can_not_be(first, second, message) -> None:
    throughput = Throughput()
    throughput.update(**first)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        throughput.update(**second)
    assert throughput.compute()["time"] == first["time"]  # the wrong reading left nothing


def test_a_window_of_one_reading() -> None:
    message = "`Throughput(window_size=1)` can't tell a rate, which needs two readings. Write `window_size=2` or more."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Throughput(window_size=1)


def test_the_monitor_logs_through_fabric() -> None:
    rows = _Rows()
    fabric = Fabric(accelerator="cpu", loggers=rows)
    monitor = ThroughputMonitor(fabric, window_size=2, memory=True, available_flops=100)
    monitor.update(time=1.0, batches=1, samples=4, flops=5)
    monitor.update(time=2.0, batches=2, samples=8, flops=5)
    logged = monitor.compute_and_log(loss=0.5)
    monitor.compute_and_log(step=7)
    assert [step for step, _ in rows.rows] == [0, 7]
    assert rows.rows[0][1] == logged
    assert (logged["loss"], logged["device/samples_per_sec"], logged["device/mfu"]) == (0.5, 4.0, 0.05)
    assert "samples_per_sec" not in logged  # one device is all there is
    assert 0 < logged["device/memory_allocated"] <= logged["device/memory_peak"]


def test_a_cpu_has_no_peak_and_no_mfu() -> None:
    monitor = ThroughputMonitor(Fabric(accelerator="cpu", precision="bf16-mixed"))
    assert monitor.available_flops is None
    assert get_available_flops(torch.device("cpu"), torch.float32) is None
    monitor.update(time=1.0, batches=1, samples=1, flops=1)
    monitor.update(time=2.0, batches=2, samples=2, flops=1)
    assert "device/mfu" not in monitor.compute()


def _ranks_differ(context):
    fabric = context.fabric()
    results = []
    for over_ranks in (False, True):
        monitor = ThroughputMonitor(fabric, over_ranks=over_ranks)
        monitor.compute()  # nothing to tell yet, on any rank
        for step in (1, 2):
            monitor.update(time=step, batches=step, samples=step, lengths=10 * step * (context.rank + 1))
        metrics = monitor.compute()
        results.append((metrics["device/items_per_sec"], metrics["items_per_sec"], metrics["batches_per_sec"]))
    return results


@pytest.mark.ranks
def test_over_ranks_adds_up_what_each_measured() -> None:
    first, second = run_ranks(2, _ranks_differ)
    assert first == [(10, 20, 2), (10, 30, 2)]
    assert second == [(20, 40, 2), (20, 30, 2)]


def test_measured_flops_are_those_of_the_matrix_products() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        x = torch.randn(32, 8)
    products = 2 * 32 * (8 * 16 + 16 * 4)
    assert measure_flops(model, lambda: model(x)) == products
    # backward: twice, but the first layer needs no gradient of its input
    assert measure_flops(model, lambda: model(x), lambda y: y.mean()) == 3 * products - 2 * 32 * 8 * 16


def test_measuring_leaves_the_gradients_as_they_were() -> None:
    model = torch.nn.Linear(2, 2)
    kept = model.weight.grad = torch.ones(2, 2)
    x = torch.randn(3, 2)
    measure_flops(model, lambda: model(x), lambda y: y.sum())
    assert model.weight.grad is kept
    assert torch.equal(kept, torch.ones(2, 2))
    assert model.bias.grad is None


def test_infinite_rates_never_appear() -> None:
    monitor = Throughput(available_flops=0)
    monitor.update(time=1.0, batches=1, samples=1, flops=1)
    monitor.update(time=2.0, batches=2, samples=2, flops=1)
    assert all(math.isfinite(value) for value in monitor.compute().values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_known_gpu_has_a_peak() -> None:
    device = torch.device("cuda", 0)
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    assert ThroughputMonitor(fabric).available_flops == get_available_flops(device, torch.bfloat16)
