"""What an alarm says to people, and how urgent it is."""

from __future__ import annotations

import json

import pytest

from serin.formats.importance import ColumnImportance, Importance
from serin.formats.reason import Reason
from serin.monitoring.drift.alarm import Alarm, BinShift
from serin.monitoring.drift.alerts import drift_alert, priority_of
from tests.fakes.drift import category_column, series_of, statistics_of

STATISTICS = statistics_of([category_column("carrier", ["AA"])], [series_of(0, (0.5, 0.5, 0.0, 0.0))])
GONE = BinShift(bin=0, label="AA", direction="less", then=0.1234, now=0.0, tolerance=0.01, beyond=0.1134)
NEW = BinShift(
    bin=2, label="unseen values", direction="more", then=0.0, now=0.0001, tolerance=0.01, beyond=0.0
)


def alarm(**facts: object) -> Alarm:
    usual = {
        "series": 0, "column": "carrier", "source": "request", "segments": (), "bins": (GONE, NEW), "size": 0.1,
        "since": 1_800_000_000.0, "at": 1_800_000_600.0, "rows": 2000,
    }  # fmt: skip
    return Alarm(**{**usual, **facts})  # type: ignore[arg-type]


def importance(**losses: float) -> Importance:
    columns = tuple(
        ColumnImportance(column=name, source="request", loss=loss, low=loss, high=loss)
        for name, loss in losses.items()
    )
    return Importance(metric="auc", value=0.9, rows=10, repeats=1, seed=0, columns=columns)


def test_an_alert_names_then_now_since_and_the_segment() -> None:
    found = drift_alert(
        "flights",
        "flights-v3",
        alarm(segments=("origin=JFK", "origin=LGA")),
        STATISTICS,
        importance(carrier=0.2),
    )
    assert found.title == "carrier drifted where origin=JFK or origin=LGA (AA from 12.3% to 0% of rows)"
    assert found.text == (
        "Since 2027-01-15 08:00 UTC: the share of AA is 0%, 12.3% in training (tolerance 1%); also unseen values "
        "from 0% to <0.05%. Seen after 2,000 rows, at 2027-01-15 08:10 UTC. Only where origin=JFK or origin=LGA. "
        "Importance: number 1 of 1 columns. To look: `serin drift flights`, `serin captures show flights`. To retrain "
        "on newer rows: `serin run SPEC`. To go back: `serin rollout rollback flights`."
    )
    assert json.loads(json.dumps(found.facts))["segments"] == ["origin=JFK", "origin=LGA"]


def test_an_alert_quotes_values_that_training_never_had() -> None:
    found = drift_alert("flights", "flights-v3", alarm(examples=("XY", "it's")), STATISTICS, None)
    assert "Values that training never had, for example: 'XY', \"it's\". Seen after" in found.text
    assert found.facts["examples"] == ["XY", "it's"]


@pytest.mark.parametrize(
    ("losses", "rank", "severity"),
    [
        ({"carrier": 0.2, "dest": 0.1}, 1, "ticket"),
        ({"carrier": 0.001, "dest": 0.1}, 2, "info"),
        ({"carrier": -0.1, "dest": -0.2}, 1, "ticket"),  # nothing matters: nothing can be left out
        ({"dest": 0.1}, None, "ticket"),
    ],
)
def test_priority_follows_importance(losses: dict[str, float], rank: int | None, severity: str) -> None:
    priority = priority_of("carrier", importance(**losses))
    assert (priority.rank, priority.severity) == (rank, severity)


def test_scores_are_never_of_low_priority() -> None:
    found = drift_alert("flights", "flights-v3", alarm(column="score", source="score"), STATISTICS, None)
    assert found.severity == "ticket"
    assert found.title.startswith("the scores drifted (")


def test_the_event_of_an_alert_becomes_the_reason_of_a_version() -> None:
    found = drift_alert("flights", "flights-v3", alarm(), STATISTICS, None)
    body = {
        "title": found.title,
        "text": found.text,
        "since": found.since,
        "fired": 1.8e9 + 700,
        "release": "flights-v3",
    }
    reason = Reason.of_event("drift", body, now=1.8e9 + 900)
    assert reason.text == "carrier drifted (AA from 12.3% to 0% of rows) since 2027-01-15 08:00 UTC"
    assert (reason.noticed, reason.release) == (1.8e9 + 700, "flights-v3")
