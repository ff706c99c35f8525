"""The drift page, and when a model may be trained again."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
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
from serin.reports.drift_page import AlarmView, BinView, ColumnView, DriftView, column_drawing, drift2html
from serin.spec.monitoring import MonitoringSpec

UNSEEN = BinView(label="unseen values", then=0.0, now=0.25, tolerance=0.01)
CARRIER = ColumnView(
    name="carrier<1>", source="request", kind="category", state="drifted", evidence=0.0, importance_rank=1,
    importance_share=0.6, rows=2000, nulls=(0.0, 0.0), unseen=(0.0, 0.25),
    bins=(BinView(label="AA", then=0.6, now=0.4, tolerance=0.05), BinView(label="x" * 60, then=0.4, now=0.35,
          tolerance=0.05), UNSEEN, BinView(label="null", then=0.0, now=0.0, tolerance=0.01)),
)  # fmt: skip
DISTANCE = ColumnView(
    name="distance", source="request", kind="number", state="no alarm", evidence=0.125,
    importance_rank=None, importance_share=None, rows=2000, nulls=(0.01, 0.012), outside=(0.0, 0.001),
    bins=tuple(
        BinView(label=label, then=then, now=then, tolerance=0.02)
        for label, then in (
            ("1 to 500", 0.5), ("500 to 900", 0.49), ("below 1", 0.0), ("above 900", 0.0), ("null", 0.01)
        )
    ),
)  # fmt: skip
ALARM = AlarmView(
    column=CARRIER.name, title="carrier drifted", text="Since <now>", severity="ticket", segments=("origin=JFK",),
    bins=(UNSEEN,), rows=900, since=1.8e9, at=1.8e9 + 600,
)  # fmt: skip
VIEW = DriftView(
    model="flights", release="flights-v3", false_alarms=1.0, origin="weeks", weeks=30, training_rows=1000, rows=2000,
    first=1.8e9, newest=1.8e9 + 900, day_since=1.8e9, columns=(CARRIER, DISTANCE), alarms=(ALARM,),
    past=(dataclasses.replace(ALARM, ended=1.8e9 + 9000),),
)  # fmt: skip


def test_the_page_stands_alone_and_its_drawings_are_well_formed() -> None:
    page = drift2html(VIEW)
    assert not re.search(r"<script|<link|src=|@import|https?://(?!www\.w3\.org)", page)
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        assert len(list(ET.fromstring(drawing))) > 10


def test_the_page_shows_states_evidence_alarms_and_escapes_names() -> None:
    page = drift2html(VIEW)
    assert '<span class="bad">carrier&lt;1&gt;</span>: drifted.' in page
    assert "carrier<1>" not in page
    origin = "from how much the 30 weeks of training differ"
    for words in ("12.5%", "Open alarms", "Earlier alarms", origin, "0% → 25"):
        assert words in page


def test_a_quiet_model_says_that_no_column_has_drifted() -> None:
    page = drift2html(dataclasses.replace(VIEW, columns=(DISTANCE,), alarms=(), past=()))
    assert "no alarm</span>: there is not enough evidence that a column has drifted" in page
    assert "Open alarms" not in page


def test_columns_without_rows_and_all_zero_bins_are_drawn() -> None:
    empty = BinView(label="null", then=0.0, now=0.0, tolerance=0.01)
    for kind in ("category", "number", "timestamp"):
        column = dataclasses.replace(DISTANCE, kind=kind, bins=(empty, empty), rows=0, state="no rows")
        assert "no rows" in drift2html(dataclasses.replace(VIEW, columns=(column,)))


def test_without_rows_nothing_is_called_different() -> None:
    """Training shares beside 0% would look like drift."""
    for column in (CARRIER, DISTANCE):
        idle = dataclasses.replace(
            column,
            rows=0,
            state="no rows",
            bins=tuple(dataclasses.replace(each, now=0.0) for each in column.bins),
        )
        assert idle.largest is None
        page = drift2html(dataclasses.replace(VIEW, columns=(idle,), alarms=(), past=()))
        assert "most different" not in page
        assert 'class="n">0% → ' not in page
        assert "alarm" not in column_drawing(idle).embedded("title")
        assert "alarm" in column_drawing(dataclasses.replace(idle, rows=1)).embedded("title")


def test_the_most_different_bin_is_the_one_that_differs_most_by_its_own_tolerance() -> None:
    def largest(*bins: tuple[float, float, float]) -> BinView | None:
        shown = tuple(BinView(label="x", then=then, now=now, tolerance=may) for then, now, may in bins)
        return dataclasses.replace(DISTANCE, bins=shown).largest

    wide, narrow, same = (0.5, 0.54, 0.05), (0.05, 0.061, 0.01), (0.0, 0.0, 0.01)
    assert largest(same, wide, narrow) == BinView(label="x", then=0.05, now=0.061, tolerance=0.01)
    assert largest(same, wide) == BinView(label="x", then=0.5, now=0.54, tolerance=0.05)
    assert largest(same) == BinView(label="x", then=0.0, now=0.0, tolerance=0.01)


def test_the_view_is_json() -> None:
    assert json.loads(json.dumps(dataclasses.asdict(VIEW)))["columns"][0]["unseen"] == [0.0, 0.25]


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
