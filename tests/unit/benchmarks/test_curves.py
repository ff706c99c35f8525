"""The scaling curves: slopes and bends, and contenders that do all their work."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import log_curve
from benchmarks.scale.curves import Curve, table
from benchmarks.scale.etl_load import run
from benchmarks.suite.curves_picture import draw_curves


def curve(points: dict[int, float], expected: float = 1.0) -> Curve:
    return Curve(name="rows", what="work by rows", unit="s", expected=expected, points=points)


def test_the_slope_is_that_of_the_two_largest_sizes() -> None:
    assert curve({10: 5.0, 100: 1.0, 1000: 10.0}).slope == pytest.approx(1.0)
    assert curve({10: 1.0, 100: 10.0, 1000: 100.0}).fitted == pytest.approx(1.0)
    assert curve({100: 1.0, 1000: 1.0}).slope == pytest.approx(0.0)


def test_a_curve_that_rises_more_than_it_should_bends_there() -> None:
    steep = curve({10: 1.0, 100: 10.0, 1000: 400.0})
    assert steep.bends == [1000]
    assert steep.verdict == "steeper than linear up to 1,000"
    assert (
        curve({10: 1.0, 100: 2.0, 1000: 20.0}).verdict == "linear, or better"
    )  # a fixed cost at the beginning
    assert curve({10: 1.0, 100: 2.0}, expected=0.0).bends == [100]
    assert "slope 1.60 at the end" in "\n".join(table([steep]))


def test_each_curve_has_a_picture(tmp_path: Path) -> None:
    document = {
        "parts": [
            {"name": "loader"},
            {"name": "scale", "curves": {"rows": curve({10: 1.0, 100: 9.0}).to_json()}},
        ]
    }
    (path,) = draw_curves(document, tmp_path / "cpu-x.json")
    assert path.name == "cpu-x-curve-rows.svg"
    assert "work by rows" in path.read_text()


def test_a_lap_builds_the_whole_table(tmp_path: Path) -> None:
    folder = tmp_path / "lap"
    found = run({"rows": 500, "columns": 3, "cardinality": 7, "folder": str(folder)})
    assert found["rows"] == 500
    assert found["seconds"] > 0
    assert not folder.exists()


def test_every_file_of_a_log_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_curve, "FILE_LINES", 20_000)
    found = log_curve.run({"lines": 60_000, "folder": str(tmp_path)})
    assert 8_000 < found["compared"] < 60_000 * 0.25  # of the candidate's requests, those of whole blocks
