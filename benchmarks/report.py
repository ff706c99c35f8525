"""Formats a benchmark's result: a table for people, a last line of key=value pairs, and a JSON file with everything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.race import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    benchmark: str
    mode: str  # quick or full
    environment: dict[str, Any]
    cases: dict[str, dict[str, Result]]
    line: dict[str, float]  # the last line: ratios, and what is good is in docs/benchmarks.md
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    tables: list[str] = field(default_factory=list)  # of a benchmark that is not a race
    figures: dict[str, Any] = field(default_factory=dict)  # ... and what is in them

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "serin.benchmark",
            "version": 1,
            "benchmark": self.benchmark,
            "mode": self.mode,
            "environment": self.environment,
            "cases": {case: _case_json(results) for case, results in self.cases.items()},
            "figures": self.figures,
            "line": self.line,
            "notes": self.notes,
        }


def write(report: Report, path: Path) -> None:
    path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")


def show(report: Report) -> str:
    lines: list[str] = []
    for case, results in report.cases.items():
        lines += [f"{report.benchmark}, {case}", *_table(results), ""]
    lines += report.tables
    lines += [f"note: {note}" for note in report.notes]
    lines.append(last_line(report.line))
    return "\n".join(lines)


def last_line(values: Mapping[str, float]) -> str:
    return " ".join(f"{key}={value:.4g}" for key, value in values.items())


def _table(results: Mapping[str, Result]) -> list[str]:
    ours = next(result for result in results.values() if result.role == "ours")
    header = (
        f"  {'':<14}{'role':<7}{'median':>10}{'fastest':>10}{'slowest':>10}{'/ ours':>9}{'peak memory':>14}"
    )
    rows = [
        f"  {name:<14}{result.role:<7}"
        f"{result.median_s:>8.3f} s{min(result.seconds):>8.3f} s{max(result.seconds):>8.3f} s"
        f"{result.times_as_long_as(ours):>9.2f}{result.peak_bytes / 1e6:>11,.0f} MB"
        for name, result in sorted(results.items(), key=lambda item: item[1].median_s)
    ]
    return [header, *rows]


def _case_json(results: Mapping[str, Result]) -> dict[str, Any]:
    return {
        name: {
            "role": result.role,
            "seconds": result.seconds,
            "median_s": result.median_s,
            "peak_bytes": result.peak_bytes,
            "answer": result.laps[-1].answer,
        }
        for name, result in results.items()
    }
