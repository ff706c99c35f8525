"""Requests that do not fit a model's columns are reported as what they are, from the gateway's log to the alert."""

import json
from pathlib import Path

import pytest

from serin.host.wiring import request_log
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.store.artifacts import Release
from serin.watcher.history_duty import HistoryDuty, Promises
from serin.watcher.report_duties import RefusalsDuty
from tests.fakes.rollout import go_live

NOW = 1_800_000_000.0
LINE = {
    "model": "flights", "epoch": 1, "arm": "stable", "release": "flights-v1", "grpc": None, "us": 4000,
    "attempts": 1, "flags": "-", "id": "r", "ms": 4.1, "received_ms": 0.1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def live(home: Path) -> None:
    go_live(home, Release(model="flights", version=1), NOW)


def look(home: Path, now: float, *, fine: int, refused: int) -> None:
    """So many requests arrive in the minute before `now`, then the watcher looks."""
    path = request_log(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        for number, code in enumerate([200] * fine + [400] * refused):
            log.write(json.dumps({**LINE, "t": now - 60 + number / 100, "code": code}) + "\n")
    history = HistoryDuty(home, Promises())
    history.tick(now)
    history.close()
    RefusalsDuty(home, AlertBook(home)).tick(now)


def test_a_changed_schema_is_reported_and_ends_when_requests_fit_again(home: Path) -> None:
    look(home, NOW, fine=900, refused=0)
    assert read_alerts(home).open == ()
    look(home, NOW + 60, fine=100, refused=100)
    (opened,) = read_alerts(home).open
    assert (opened.alert.key, opened.alert.kind) == ("flights/data/refused", "data")
    assert opened.alert.title == "9% of the requests are refused"
    assert "100 of 1,100 requests" in opened.alert.text
    assert NOW - 60 <= opened.alert.since <= NOW + 60
    look(home, NOW + 120, fine=1000, refused=0)
    assert len(read_alerts(home).open) == 1, "4% within ten minutes: not over yet"
    look(home, NOW + 900, fine=200, refused=0)
    assert read_alerts(home).open == ()


@pytest.mark.parametrize(("fine", "refused"), [(0, 19), (1000, 40), (0, 0)])
def test_few_refused_requests_are_not_reported(home: Path, fine: int, refused: int) -> None:
    look(home, NOW, fine=fine, refused=refused)
    assert read_alerts(home).open == ()


def test_without_requests_an_alert_stays(home: Path) -> None:
    look(home, NOW, fine=0, refused=50)
    look(home, NOW + 3600, fine=0, refused=0)
    assert len(read_alerts(home).open) == 1
