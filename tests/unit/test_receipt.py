"""Receipts: what was measured, and nothing that was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serin.hardware import Device
from serin.receipt import judge, measure


def test_a_stage_without_devices_has_seconds_and_a_rate() -> None:
    with measure("etl") as stage:
        stage.rows = 1000
    receipt = stage.receipt
    assert receipt is not None
    assert receipt.seconds > 0
    assert receipt.rows_per_s == pytest.approx(1000 / receipt.seconds)
    assert receipt.device == ()


def test_the_rate_is_over_the_working_time_when_it_is_told() -> None:
    with measure("train") as stage:
        stage.rows, stage.work_s = 1000, 4.0
    assert stage.receipt is not None
    assert stage.receipt.rows_per_s == 250


def test_a_failed_stage_has_a_receipt_too() -> None:
    with pytest.raises(OSError, match="disk full"), measure("export") as stage:
        raise OSError("disk full")
    assert stage.receipt is not None
    assert stage.receipt.rows_per_s is None


def test_a_device_the_driver_does_not_know_is_booked_but_not_measured() -> None:
    with measure("train", [Device(id="GPU-none", name="Stand-in", memory_bytes=1)]) as stage:
        stage.peak_bytes["GPU-none"] = 7
    assert stage.receipt is not None
    (cost,) = stage.receipt.device
    assert (cost.booked_s, cost.peak_bytes) == (stage.receipt.seconds, 7)
    assert (cost.busy_share, cost.joules) == (None, None)


def test_a_receipt_on_disk_has_the_fields_of_the_format(tmp_path: Path) -> None:
    with measure("etl") as stage:
        pass
    assert stage.receipt is not None
    stage.receipt.write(tmp_path / "receipt.json")
    written = json.loads((tmp_path / "receipt.json").read_text())
    assert list(written) == [
        *("format", "version", "stage", "started", "seconds", "device"),
        *("rows", "rows_per_s", "data_wait_share", "bound", "advice"),
    ]


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
