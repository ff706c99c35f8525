"""Receipts: what was measured, and nothing that was not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serin.machine.hardware import Device
from serin.machine.usage import BusyTime, GpuWatch
from serin.store.receipt import Work, judge, measure
from serin.store.waits import Wait


def test_a_stage_without_devices_is_charged_for_the_cpu_and_its_memory() -> None:
    with measure("etl") as stage:
        stage.rows = 1000
        sum(number * number for number in range(300_000))
    receipt = stage.receipt
    assert receipt.rows_per_s == pytest.approx(1000 / receipt.seconds)
    (cpu,) = receipt.device
    assert (cpu.id, cpu.booked_s, cpu.joules) == ("cpu", receipt.seconds, None)
    assert cpu.busy_share is not None
    assert 0 < cpu.busy_share <= 1
    assert cpu.peak_bytes is not None
    assert cpu.peak_bytes > 10_000_000


def test_only_the_process_of_the_run_is_charged() -> None:
    with measure("train") as stage:
        held = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        stage.watch.look_at(held.pid)
        sum(number * number for number in range(2_000_000))  # by us, who are not the run
        held.communicate(b"\n", timeout=60)
    (cpu,) = stage.receipt.device
    assert cpu.busy_share is not None
    assert cpu.busy_share < 0.3


def test_the_rate_is_over_the_working_time_when_it_is_known() -> None:
    with measure("train") as stage:
        stage.rows, stage.work_s = 1000, 4.0
    assert stage.receipt.rows_per_s == 250


def test_a_failed_stage_has_a_receipt_too() -> None:
    with pytest.raises(OSError, match="disk full"), measure("export") as stage:
        raise OSError("disk full")
    assert stage.receipt.rows_per_s is None


def test_a_device_the_driver_does_not_know_is_booked_but_not_measured() -> None:
    with measure("train", [Device(id="GPU-none", name="Stand-in", memory_bytes=1)]) as stage:
        stage.peak_bytes["GPU-none"] = 7
    (cost,) = stage.receipt.device
    assert (cost.booked_s, cost.peak_bytes) == (stage.receipt.seconds, 7)
    assert (cost.busy_share, cost.joules, stage.receipt.joules) == (None, None, None)


def test_the_cost_is_that_of_all_devices_at_the_given_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERIN_PRICE_PER_HOUR", "3.60")
    devices = [Device(id=f"GPU-{number}", name="Stand-in", memory_bytes=1) for number in range(2)]
    with measure("train", devices) as stage:
        pass
    assert stage.receipt.cost == pytest.approx(2 * stage.receipt.seconds * 0.001)


def test_without_a_price_there_is_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERIN_PRICE_PER_HOUR", "a lot")
    with measure("train") as stage:
        pass
    assert stage.receipt.cost is None


def test_a_receipt_on_disk_has_the_fields_of_the_format(tmp_path: Path) -> None:
    with measure("etl") as stage:
        pass
    stage.receipt.write(tmp_path / "receipt.json")
    written = json.loads((tmp_path / "receipt.json").read_text())
    names = "stage started seconds device rows rows_per_s data_wait_share mfu joules cost bound advice waits"
    assert list(written) == ["format", "version", *names.split()]


@pytest.mark.parametrize(
    ("data_wait_share", "busy_share", "work_share", "bound"),
    [
        (None, None, None, None),
        (0.5, 0.1, 0.9, "data"),
        (0.01, 0.1, 0.9, "launch"),
        (0.01, 0.9, 0.9, "compute"),
        (0.01, None, 0.9, "compute"),
        (0.5, 0.1, 0.05, "start"),
    ],
)
def test_the_bound_is_what_held_the_stage_back(
    data_wait_share: float | None, busy_share: float | None, work_share: float | None, bound: str | None
) -> None:
    found, _ = judge(data_wait_share=data_wait_share, busy_share=busy_share, work_share=work_share)
    assert found == bound


@pytest.mark.parametrize(
    ("flops", "moved", "bound", "advice"),
    [
        (10.0, 10.0, "launch", "training.batch_rows"),
        (50.0, 10.0, "compute", "training.precision"),
        (10.0, 80.0, "memory", "embedding"),
    ],
)
def test_the_roofline_tells_small_operations_from_memory_and_products(
    flops: float, moved: float, bound: str, advice: str
) -> None:
    with measure("train") as stage:
        stage.work_s = 1e9  # of which the device would need at best flops and moved percent
        stage.work = Work(
            flops=flops, bytes=moved, peak_flops_per_s=100 / stage.work_s, peak_bytes_per_s=100 / stage.work_s
        )
    assert stage.receipt.mfu == pytest.approx(flops / 100)
    assert stage.receipt.bound == bound
    assert advice in stage.receipt.advice


class _Driver:
    """A GPU on which processes hold memory; `named`: the driver tells which. `periods`: the busy share of each tenth of
    a second, of which the driver keeps all; None: it keeps none."""

    def __init__(self, *, named: bool = True, periods: list[float] | None = None) -> None:
        self._named, self._free, self._periods = named, 1000, periods
        self.now_us = 0

    def busy_share(self, device: str) -> float | None:
        return 0.25

    def busy_samples(self, device: str, since_us: int) -> list[tuple[int, float]] | None:
        if self._periods is None:
            return None
        ends = [(100_000 * (number + 1), share) for number, share in enumerate(self._periods)]
        return [(end, share) for end, share in ends if since_us < end <= self.now_us]

    def free_bytes(self, device: str) -> int | None:
        self._free -= 100
        return self._free

    def process_bytes(self, device: str) -> dict[int, int]:
        return {os.getpid(): 70, 1: 10_000} if self._named else {}

    def joules(self, device: str) -> float | None:
        return 5.0


@pytest.mark.parametrize("named", [True, False])
def test_the_peak_of_a_gpu_s_memory_is_that_of_the_run_s_processes(named: bool) -> None:
    watch = GpuWatch([Device(id="GPU-a", name="Stand-in", memory_bytes=1000)], _Driver(named=named))
    watch.start()
    deadline = time.monotonic() + 60
    while not watch._peak and time.monotonic() < deadline:
        time.sleep(0.01)
    (cost,) = watch.stop(1.0, {})
    assert cost.peak_bytes is not None
    assert cost.peak_bytes == 70 if named else cost.peak_bytes >= 100
    (told,) = watch.stop(1.0, {"GPU-a": 7})
    assert told.peak_bytes == 7, "what the run knows itself goes first"


def test_a_short_burst_is_seen_by_a_watch_that_could_look_only_at_the_end() -> None:
    """As when a GPU library holds the interpreter: of a stage of nine seconds, 1.3 were busy."""
    before, stage = [1.0] * 10, [0.0] * 40 + [1.0] * 13 + [0.0] * 37
    driver = _Driver(periods=before + stage)
    driver.now_us = 1_000_000
    watch = GpuWatch([Device(id="GPU-a", name="Stand-in", memory_bytes=1000)], driver)
    watch._sample_s = 3600.0
    watch.start()
    driver.now_us = 10_000_000
    (cost,) = watch.stop(9.0, {})
    assert cost.busy_share == pytest.approx(1.3 / 9)


def test_a_driver_that_keeps_no_periods_is_asked_for_its_last_one() -> None:
    watch = GpuWatch([Device(id="GPU-a", name="Stand-in", memory_bytes=1000)], _Driver())
    watch.start()
    (cost,) = watch.stop(1.0, {})
    assert cost.busy_share == pytest.approx(0.25)


def test_time_of_which_nothing_is_known_does_not_count() -> None:
    busy = BusyTime(100.0)
    busy.add(100.5, 1.0)
    busy.add(100.4, 1.0)  # late
    busy.add(160.5, 0.0)  # only the last second
    assert busy.share == pytest.approx(0.5 / 1.5)
    assert BusyTime(0.0).share is None


def test_a_receipt_names_the_three_longest_waits() -> None:
    with measure("etl") as stage:
        stage.waits = [Wait(what=f"wait {number}", seconds=number) for number in range(5)]
    assert [str(wait) for wait in stage.receipt.waits] == ["wait 4 4.0 s", "wait 3 3.0 s", "wait 2 2.0 s"]
