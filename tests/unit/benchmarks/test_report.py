from __future__ import annotations

import json
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.race import Lap, Result
from benchmarks.report import Report, last_line, show, write
from benchmarks.suite.parts import read_figures


def result(role: str, *seconds: float) -> Result:
    laps = tuple(Lap(seconds=s, peak_bytes=2_000_000, answer={"path": "x"}) for s in seconds)
    return Result(role=role, laps=laps)  # type: ignore[arg-type]


REPORT = Report(
    benchmark="etl",
    mode="quick",
    environment={"machine": machine()},
    cases={"3m": {"ours": result("ours", 1.0, 1.0, 1.2), "polars": result("peer", 2.5, 2.5, 2.5)}},
    line={"polars_3m": 2.5, "limit": 0.61234},
    notes=["case lineitem was left out: no generator"],
)


def test_the_last_line_holds_key_value_pairs_and_nothing_else() -> None:
    assert show(REPORT).splitlines()[-1] == "polars_3m=2.5 limit=0.6123"


def test_a_suite_reads_back_what_the_last_line_says() -> None:
    line = {"limit": 0.6123, "pruned_0.5": -0.033, "pruned_0.5_auc": 1e-09, "rows-per-s": 2.5e05}
    assert read_figures(last_line(line)) == line


def test_the_table_names_every_contender_with_its_ratio_to_ours() -> None:
    (row,) = (line for line in show(REPORT).splitlines() if "polars " in line)
    assert row.split() == ["polars", "peer", "2.500", "s", "2.500", "s", "2.500", "s", "2.50", "2", "MB"]


def test_what_was_left_out_is_said() -> None:
    assert "note: case lineitem was left out" in show(REPORT)


def test_the_file_keeps_every_lap_and_the_machine(tmp_path: Path) -> None:
    write(REPORT, tmp_path / "r.json")
    stored = json.loads((tmp_path / "r.json").read_text())
    assert (stored["format"], stored["version"]) == ("serin.benchmark", 1)
    assert stored["cases"]["3m"]["ours"]["seconds"] == [1.0, 1.0, 1.2]
    assert stored["environment"]["machine"]["cores"] >= 1
    assert stored["environment"]["machine"]["cpu_flags"]
