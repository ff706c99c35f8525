"""The scaling curves: an exponent of 1 is linear, and each size gives a table with so many rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale.curves import exponent, table
from benchmarks.scale.etl_load import run


def test_the_exponent_is_that_of_the_two_largest_sizes() -> None:
    assert exponent({10: 5.0, 100: 1.0, 1000: 10.0}) == pytest.approx(1.0)
    assert exponent({100: 1.0, 1000: 1.0}) == pytest.approx(0.0)
    assert "exponent 2.00" in table({"rows": {10: 1.0, 100: 100.0}})[1]


def test_a_lap_builds_the_whole_table(tmp_path: Path) -> None:
    folder = tmp_path / "lap"
    found = run({"rows": 500, "columns": 3, "cardinality": 7, "folder": str(folder)})
    assert found["rows"] == 500
    assert found["seconds"] > 0
    assert not folder.exists()
