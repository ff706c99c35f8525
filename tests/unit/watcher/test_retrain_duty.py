"""An alarm that stays open asks for another retraining as soon as one is allowed, without waiting for Prefect."""

from pathlib import Path
from typing import Any, Literal

import pytest

from serin.formats.reason import Reason
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.book import AlertBook
from serin.monitoring.retrain import RetrainBook, read_retraining
from serin.spec.monitoring import MonitoringSpec
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.watcher.retrain_duty import RetrainDuty
from tests.fakes.prefect import Server, prefect_at_work
from tests.fakes.rollout import go_live
from tests.fakes.small_pipeline import NAME, small_spec, write_spec
from tests.kit.stacks import stack_in

HOUR = 3600.0
NOW = 1_800_000_000.0
LIVE = Release(model=NAME, version=1)


@pytest.fixture(autouse=True)
def retrained(home: Path, tmp_path: Path) -> None:
    """Version 1 is live, and was trained again an hour ago without success."""
    store = Store.open()
    with store.workspace() as work:
        write_spec(work, small_spec(tmp_path / "data", rows=10, monitoring={"retrain": ["drift", "quality"]}))
        (work / "manifest.json").write_text("{}")
        store.publish_bundle(NAME, store.reserve_version(NAME), work)
    go_live(home, LIVE, NOW)
    book, began = RetrainBook(home, NAME), NOW - HOUR
    reason = Reason(kind="drift", text="carrier drifted", noticed=began)
    book.request(reason, MonitoringSpec(), live=LIVE.name, run="a", now=began)
    book.end("a", "failed", "worse", began + 60)


def fire(
    home: Path, kind: Literal["drift", "quality", "objective"], *, share: float = 0.5, **facts: Any
) -> None:
    title = f"{kind} of {share:g}"
    key = f"{NAME}/{kind}/{share:g}"
    usual: dict[str, Any] = {"release": LIVE.name, "severity": "ticket", "since": NOW - 2 * HOUR}
    found = {"importance_share": share}
    AlertBook(home).fire(
        Alert(key=key, kind=kind, model=NAME, title=title, text="", facts=found, **{**usual, **facts}), NOW
    )


def events(server: Server) -> list[dict[str, Any]]:
    return [each for call, body in server.asked if call == "POST /events" for each in body]


def tick(duty: RetrainDuty, now: float) -> None:
    duty.tick(now)
    if NAME in duty._requests:
        duty._requests[NAME].wait(30)


def test_the_most_important_alarm_asks_once_when_the_cool_down_is_over(home: Path) -> None:
    fire(home, "drift", share=0.1)
    fire(home, "drift", share=0.6)
    fire(home, "drift", share=0.9, severity="info")
    with prefect_at_work() as server:
        server.answers["POST /events"] = (204, None)
        stack_in(home, prefect_api_url=server.url)
        duty = RetrainDuty(home)
        tick(duty, NOW + 22 * HOUR)
        assert events(server) == []
        tick(duty, NOW + 24 * HOUR)
        for later in (25, 26):
            tick(duty, NOW + later * HOUR)
        tick(RetrainDuty(home), NOW + 27 * HOUR)
        (event,) = events(server)
    assert (event["event"], event["resource"]["serin.model"]) == ("serin.drift", NAME)
    reason = Reason.of_event("drift", event["payload"], now=NOW + 25 * HOUR)
    assert (reason.text, reason.release) == ("drift of 0.6 since 2027-01-15 06:00 UTC", LIVE.name)
    assert reason.noticed == NOW + 24 * HOUR
    assert read_retraining(home, NAME).asked_again == NOW + 24 * HOUR


@pytest.mark.parametrize(
    "alarm",
    [{"kind": "objective"}, {"kind": "drift", "release": f"{NAME}-v7"}],
    ids=["a kind that retrains nothing", "a version that is not live"],
)
def test_other_alarms_do_not_ask(home: Path, alarm: Any) -> None:
    fire(home, **alarm)
    with prefect_at_work() as server:
        stack_in(home, prefect_api_url=server.url)
        tick(RetrainDuty(home), NOW + 24 * HOUR)
        assert events(server) == []


def test_a_quality_alarm_asks_with_its_own_event(home: Path) -> None:
    fire(home, "quality")
    with prefect_at_work() as server:
        server.answers["POST /events"] = (204, None)
        stack_in(home, prefect_api_url=server.url)
        tick(RetrainDuty(home), NOW + 24 * HOUR)
        assert [each["event"] for each in events(server)] == ["serin.quality"]


def test_a_server_that_is_down_is_asked_again(home: Path) -> None:
    fire(home, "drift")
    stack_in(home, prefect_api_url="http://127.0.0.1:9/api")
    duty = RetrainDuty(home)
    tick(duty, NOW + 24 * HOUR)
    first = duty._requests[NAME]
    assert first.problem is not None
    tick(duty, NOW + 25 * HOUR)
    assert duty._requests[NAME] is not first
    assert read_retraining(home, NAME).asked_again == 0.0
