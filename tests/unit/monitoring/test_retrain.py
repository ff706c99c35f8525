"""When a model may be trained again: cool-down, budget, clocks, crashes, and what is kept about it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serin.errors import FileBroken
from serin.formats.reason import Reason, read_reason
from serin.monitoring.retrain import (
    History,
    Refusal,
    RetrainBook,
    Retraining,
    ask_again_at,
    decide,
    latest_outcome,
    read_retraining,
)
from serin.spec.monitoring import MonitoringSpec

DAY = 86_400.0
NOW = 1_800_000_000.0
BEGAN = "the retraining of 2027-01-14 08:00 UTC (drift: carrier drifted)"
SPEC = MonitoringSpec.model_validate({"retrain_budget": {"cool_down": "1d", "per_week": 2}})


def reason(kind: Any = "drift", *, noticed: float = NOW, release: str | None = "flights-v1") -> Reason:
    return Reason(kind=kind, text="carrier drifted", noticed=noticed, release=release)


def begun(days_ago: float, kind: Any = "drift", outcome: Any = "promoted") -> Retraining:
    t = NOW - days_ago * DAY
    return Retraining(t=t, run=f"run {days_ago}", reason=reason(kind, noticed=t), outcome=outcome)


def ask(*entries: Retraining, kind: Any = "drift", spec: MonitoringSpec = SPEC) -> Retraining | Refusal:
    history = History(begun=tuple(sorted(entries, key=lambda each: each.t)))
    return decide(history, reason(kind), spec, live="flights-v1", run="new", now=NOW)


@pytest.mark.parametrize(
    ("entries", "kind", "until_days"),
    [
        ((), "drift", None),
        ((begun(0.5),), "drift", 0.5),
        ((begun(0.5),), "quality", 0.5),
        ((begun(0.5),), "nightly", None),
        ((begun(0.5),), "asked", None),
        ((begun(1.5),), "drift", None),
        ((begun(3), begun(1.5)), "drift", 4.0),  # two within seven days: until the older one is a week old
        ((begun(3), begun(0.5)), "drift", 4.0),
        ((begun(6.9), begun(0.5)), "drift", 0.5),
        ((begun(8), begun(1.5)), "drift", None),
        ((begun(3, "nightly"), begun(2, "nightly"), begun(1.5)), "drift", None),
        ((begun(3, outcome="unchanged"), begun(1.5)), "drift", None),
        ((begun(3, outcome="failed"), begun(1.5, outcome=None)), "drift", 4.0),
        ((begun(-2),), "drift", None),  # the clock was set back
    ],
)
def test_the_next_retraining_waits_for_the_cool_down_and_the_weekly_budget(
    entries: tuple[Retraining, ...], kind: str, until_days: float | None
) -> None:
    made = ask(*entries, kind=kind)
    if until_days is None:
        assert isinstance(made, Retraining)
        assert made.t == NOW
    else:
        assert isinstance(made, Refusal)
        assert made.until == pytest.approx(NOW + until_days * DAY)


def test_without_a_cool_down_alarms_of_the_same_moment_still_lead_to_one_run() -> None:
    hot = MonitoringSpec.model_validate({"retrain_budget": {"cool_down": 0, "per_week": 9}})
    first = Retraining(t=NOW, run="first", reason=reason())
    assert isinstance(ask(first, spec=hot), Refusal)
    assert isinstance(ask(begun(0.001), spec=hot), Retraining)


def test_while_a_version_is_rolled_out_only_a_person_trains_another() -> None:
    for kind, refused in (("drift", True), ("nightly", True), ("asked", False)):
        made = decide(
            History(), reason(kind), SPEC, live="flights-v1", run="new", now=NOW, candidate="flights-v2"
        )
        assert isinstance(made, Refusal) == refused
    history = History(refused=(Refusal(t=NOW, reason=reason(), why="rollout", until=NOW + 600),))
    assert ask_again_at(history, SPEC) == NOW + 600


def test_an_open_alarm_asks_again_after_the_cool_down_or_the_last_refusal() -> None:
    assert ask_again_at(History(), SPEC) is None
    assert ask_again_at(History(begun=(begun(0.5),)), SPEC) == NOW + 0.5 * DAY
    refusal = Refusal(t=NOW, reason=reason(), why="budget", until=NOW + 3 * DAY)
    assert ask_again_at(History(begun=(begun(0.5),), refused=(refusal,)), SPEC) == NOW + 3 * DAY


def test_a_run_that_was_interrupted_finds_its_own_decision(tmp_path: Path) -> None:
    book = RetrainBook(tmp_path, "flights")
    first = book.request(reason(), SPEC, live="flights-v1", run="a", now=NOW)
    again = RetrainBook(tmp_path, "flights").request(reason(), SPEC, live="flights-v1", run="a", now=NOW + 60)
    assert first == again
    assert len(read_retraining(tmp_path, "flights").begun) == 1
    book.end("a", "promoted", "flights-v2", NOW + 90)
    (kept,) = read_retraining(tmp_path, "flights").begun
    assert (kept.outcome, kept.detail, kept.ended) == ("promoted", "flights-v2", NOW + 90)
    assert kept.reason == reason()


def test_the_record_stays_small(tmp_path: Path) -> None:
    book = RetrainBook(tmp_path, "flights")
    book.request(reason("asked"), SPEC, live="flights-v1", run="0", now=NOW)
    book.request(reason(), SPEC, live="flights-v1", run="refused", now=NOW)
    document = json.loads(book.path.read_text())
    document |= {name: document[name] * 130 for name in ("begun", "refused")}
    book.path.write_text(json.dumps(document))
    book.request(reason(), SPEC, live="flights-v1", run="refused too", now=NOW)
    book.request(reason("asked"), SPEC, live="flights-v1", run="129", now=NOW)
    history = read_retraining(tmp_path, "flights")
    assert (len(history.begun), len(history.refused)) == (100, 100)
    assert history.begun[-1].run == "129"


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"format": "serin.retrain", "version": 9})])
def test_a_broken_record_is_named_and_not_taken_for_an_empty_one(tmp_path: Path, content: str) -> None:
    book = RetrainBook(tmp_path, "flights")
    book.path.parent.mkdir(parents=True)
    book.path.write_text(content)
    with pytest.raises(FileBroken, match=r"flights\.json"):
        book.request(reason(), SPEC, live="flights-v1", run="a", now=NOW)
    assert book.path.read_text() == content


@pytest.mark.parametrize("payload", [None, {}, {"text": 3, "since": "now", "noticed": True, "facts": [1]}])
def test_an_event_with_any_payload_gives_a_reason(payload: dict[str, Any] | None) -> None:
    made = Reason.of_event("drift", payload, now=NOW)
    assert made == Reason(kind="drift", text="the event serin.drift was sent", noticed=NOW)
    assert read_reason({"reason": made.to_json()}) == made


def test_a_reason_from_the_future_was_noticed_now() -> None:
    assert Reason.of_event("drift", {"noticed": NOW + 1e6}, now=NOW).noticed == NOW


@pytest.mark.parametrize("lineage", [{}, {"reason": "x"}, {"reason": {"kind": "boredom", "noticed": 1}}])
def test_a_version_without_a_usable_reason_has_none(lineage: dict[str, Any]) -> None:
    assert read_reason(lineage) is None


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (History(), ""),
        (History(begun=(begun(1, outcome=None),)), f"{BEGAN} has begun"),
        (
            History(begun=(replace(begun(1, outcome="unchanged"), detail="flights-v1"),)),
            f"{BEGAN} changed nothing: the tables are those that flights-v1 was trained on",
        ),
        (
            History(begun=(begun(1),), refused=(Refusal(t=NOW, reason=reason(), why="too soon"),)),
            "2027-01-15 08:00 UTC: not trained again (drift: carrier drifted): too soon",
        ),
    ],
)
def test_the_outcome_of_the_last_request_is_one_line(history: History, words: str) -> None:
    assert latest_outcome(history) == words
