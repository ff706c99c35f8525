"""The duty that records requests: alerts, care for old records, and settings from the store."""

import logging
from pathlib import Path

import pytest

from serin.formats.captures import captures_folder, parts_of_hour
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.capture.read import captured
from serin.monitoring.capture.recorder import Recorder
from serin.spec.monitoring import CaptureSpec
from serin.spec.stored import stored_capture
from serin.watcher import capture_duty as capture_duty_module
from serin.watcher.capture_duty import CaptureDuty, ClockTrust, RecorderThread
from tests.kit.waiting import Clock, until
from tests.unit.monitoring.capture.worker import NOON, Worker, keep_all, plans, recorder, request


class OpenAlerts:
    def __init__(self) -> None:
        self.open: dict[str, Alert] = {}

    def fire(self, alert: Alert, now: float) -> None:
        self.open[alert.key] = alert

    def resolve(self, key: str, now: float) -> None:
        self.open.pop(key, None)


def capture_duty(home: Path, alerts: OpenAlerts, clock: Clock) -> CaptureDuty:
    keeper = recorder(home, clock=clock)
    return CaptureDuty(home, alerts, settings=keep_all, recorder=keeper, threaded=False, clock=clock)


def test_records_that_cannot_be_written_are_one_log_line_and_one_alert_until_they_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock, alerts = Clock(), OpenAlerts()
    duty = capture_duty(tmp_path, alerts, clock)
    Worker(tmp_path).leave([request(1, NOON)])
    captures_folder(tmp_path).write_text("in the way")
    for clock.t in (0, 5, 30, 65):
        duty.tick(NOON + clock.t)
    assert list(alerts.open) == ["taxis/capture/written"]
    alert = alerts.open["taxis/capture/written"]
    assert (alert.kind, alert.model, alert.since) == ("capture", "taxis", NOON)
    assert "Free space in" in alert.text
    assert caplog.text.count("cannot be recorded") == 1
    captures_folder(tmp_path).unlink()
    clock.t = 90.0
    duty.tick(NOON + 90)
    assert alerts.open == {}
    assert captured(tmp_path, "taxis")["age"].to_pylist() == [1000]


def test_the_thread_records_without_waiting_for_a_tick_and_once_more_at_the_end(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    duty = CaptureDuty(tmp_path, OpenAlerts(), settings=keep_all, recorder=recorder(tmp_path))
    duty.tick(NOON)
    worker.leave([request(number, NOON) for number in range(4)])
    until(lambda: worker.waits == 0, "a round of the thread")
    worker.leave([request(number, NOON) for number in range(4, 9)])
    duty.close()
    assert captured(tmp_path, "taxis").num_rows == 9


def test_a_ring_that_fills_up_is_not_left_for_three_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_duty_module, "_ROUND_S", 3600.0)
    worker = Worker(tmp_path)
    thread = RecorderThread(recorder(tmp_path))
    thread.outcome()
    for number in range(0, 40, 2):
        worker.leave([request(number, NOON, rows=2000)])
        until(lambda: worker.waits < worker.ring.capacity / 2, "a round of the thread")
    assert worker.ring.full == 0
    thread.close()
    assert captured(tmp_path, "taxis").num_rows == 40_000


def test_an_error_of_the_thread_is_that_of_the_duty(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.leave([request(1, NOON)])

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    keeper = Recorder(tmp_path, plans(keep_all), broken)  # type: ignore[arg-type]
    thread = RecorderThread(keeper)
    thread.outcome()
    with pytest.raises(ZeroDivisionError):
        until(lambda: thread.outcome() is None, "an error")
    thread.close()
    assert worker.waits > 0


def test_dropped_requests_raise_an_alert_that_ends_by_itself(tmp_path: Path) -> None:
    clock, alerts, worker = Clock(), OpenAlerts(), Worker(tmp_path)
    duty = capture_duty(tmp_path, alerts, clock)
    worker.leave([request(1, NOON)])
    duty.tick(NOON)
    worker.leave([request(2, NOON)], dropped=3)
    clock.t = 61.0
    duty.tick(NOON + 61)
    assert alerts.open["taxis/capture/dropped"].facts == {"dropped": 3}
    clock.t = 800.0
    duty.tick(NOON + 800)
    assert alerts.open == {}


def test_hours_that_are_over_are_merged_and_old_ones_deleted(tmp_path: Path) -> None:
    clock, worker = Clock(), Worker(tmp_path)
    duty = capture_duty(tmp_path, OpenAlerts(), clock)
    for number in range(3):
        worker.leave([request(number, NOON + number)])
        duty.tick(NOON + number)
    folder = captures_folder(tmp_path, "taxis") / "1" / "2026-03-01T12"
    assert len(parts_of_hour(folder)) == 3
    clock.t = 7200.0
    duty.tick(NOON + 7200)
    assert len(parts_of_hour(folder)) == 1
    clock.t = 31 * 86400.0
    duty.tick(NOON + clock.t)
    assert captured(tmp_path, "taxis").num_rows == 0


def test_a_clock_that_jumps_forwards_by_a_month_deletes_nothing(tmp_path: Path) -> None:
    clock, worker = Clock(), Worker(tmp_path)
    duty = capture_duty(tmp_path, OpenAlerts(), clock)
    worker.leave([request(1, NOON)])
    duty.tick(NOON)
    clock.t = 61.0
    duty.tick(NOON + 40 * 86400)
    assert captured(tmp_path, "taxis").num_rows == 1


def test_the_clock_is_trusted_again_after_a_day() -> None:
    clock = Clock()
    trust = ClockTrust(clock)
    trusted = []
    for clock.t, now in ((0, 100.0), (60, 160.0), (70, 9e6), (80, 9e6 + 10), (90_000, 9e6 + 89_930)):
        trusted.append(trust.at(now))
    assert trusted == [True, True, False, False, True]


def test_settings_are_read_from_the_stored_spec(tmp_path: Path) -> None:
    assert stored_capture(tmp_path) == CaptureSpec()
    (tmp_path / "spec.yaml").write_text(
        "unknown_section: 1\nmonitoring: {capture: {share: 0.5, mask: [age], keep: 3d}}\n"
    )
    assert stored_capture(tmp_path) == CaptureSpec(share=0.5, mask=("age",), keep=3 * 86_400)
