"""The figures of the orchestration benchmark, from times that are known; and that its spec is a good one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.orchestration.benchmark import key_figures, table, write_pipeline
from serin.spec.load import load_spec

TIMES = {"bare": [99.0, 100.0, 130.0], "inline": [102.0] * 3, "worker": [105.0] * 3, "placed": [120.0] * 3}
AGAIN = {"bare": [9.0], "inline": [5.0], "worker": [12.0], "placed": [14.0], "flow": [1.5]}


def test_overhead_is_held_against_the_median_of_the_bare_stages() -> None:
    figures = key_figures(TIMES, AGAIN)
    assert figures["inline_overhead"] == pytest.approx(0.02)
    assert figures["placed_overhead"] == pytest.approx(0.2)
    assert figures["placed_overhead_s"] == pytest.approx(20.0)
    assert figures["placed_stage_s"] == pytest.approx(20.0 / 3)
    assert figures["placed_5_percent_s"] == pytest.approx(400.0)
    assert (figures["unchanged_flow_s"], figures["unchanged_worker_s"]) == (1.5, 12.0)


def test_the_table_has_a_line_for_every_way() -> None:
    lines = table(TIMES, AGAIN)
    assert [line.split()[0] for line in lines[1:5]] == ["bare", "inline", "worker", "placed"]
    assert "20.0%" in lines[4]


def test_two_laps_have_nothing_in_common_that_could_be_found(tmp_path: Path) -> None:
    first, second = (load_spec(write_pipeline(tmp_path / name, rows=50, epochs=1)) for name in ("a", "b"))
    assert first.data.tables != second.data.tables
    assert first.model_copy(update={"data": second.data}) == second
