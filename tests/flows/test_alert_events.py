"""Alerts as events of a real Prefect server."""

import time
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL

from serin.monitoring.alerts.book import PREFECT, AlertBook
from serin.monitoring.alerts.outbox import Outbox
from serin.prefect import rest_api
from serin.watcher.alerts_duty import PrefectChannel
from tests.kit.stacks import stack_in
from tests.kit.waiting import until
from tests.unit.monitoring.test_alert_book import ALERT

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_an_alert_and_its_end_are_one_event_each_even_when_they_are_sent_twice(home: Path) -> None:
    stack_in(home, prefect_api_url=PREFECT_API_URL.value())
    book, now = AlertBook(home), time.time()
    book.fire(ALERT, now)
    book.resolve(ALERT.key, now)
    outbox, channel = Outbox(home), PrefectChannel(home)
    while messages := [each for each in outbox.due(now) if each.receiver == PREFECT]:
        for _ in range(2):
            channel.send(messages[0])
        outbox.record_sent(messages[0])
    events = _events({"serin.objective", "serin.objective.resolved"}, at_least=2)
    assert sorted(each["event"] for each in events) == ["serin.objective", "serin.objective.resolved"]
    assert {each["resource"]["prefect.resource.id"] for each in events} == {"serin.model.flights"}
    assert {each["payload"]["key"] for each in events} == {ALERT.key}


def _events(names: set[str], *, at_least: int) -> list[dict[str, Any]]:
    """The server stores events a moment after it has taken them."""
    body = {"filter": {"event": {"name": sorted(names)}}}

    def look() -> list[dict[str, Any]]:
        found = rest_api.call(PREFECT_API_URL.value(), "POST", "/events/filter", body)["events"]
        return list(found) if len(found) >= at_least else []

    return until(look, within_s=30.0, every_s=0.2)
