"""The drift page and the command show what the watch has counted: states, both distributions, alarms, reasons."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET

from serin.reports.drift_page import column_drawing, drift2html
from serin.reports.drift_view import AlarmView, BinView, ColumnView, DriftView

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
    assert "12.5%" in page
    assert "Open alarms" in page
    assert "Earlier alarms" in page
    assert "from how much the 30 weeks of training differ" in page
    assert "0% → 25" in page


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
