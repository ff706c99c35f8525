"""Writes the table of goals in docs/benchmarks.md from the results in benchmarks/results.

    python docs/generate/benchmark_goals.py

A figure that misses its goal is shown like any other, and a goal without a figure is listed as not measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.suite.goals import GOALS  # noqa: E402
from benchmarks.suite.parts import Goal  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- goals: written by docs/generate/benchmark_goals.py from benchmarks/results -->"
END = "<!-- end of goals -->"


def render(results: Path = RESULTS) -> str:
    """Returns one table for each kind of machine without a GPU whose results are committed."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("cpu-*.json"))]
    tables = ["\n".join(_table(document)) for document in found]
    return "\n\n".join(tables) or "No results are committed yet."


def updated(page: str, block: str) -> str:
    """Returns the page with the block between the two comments replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{rest.split(END)[1]}"


def _table(document: Mapping[str, Any]) -> Iterator[str]:
    machine = document["machine"]
    parts = {part["name"]: part for part in document["parts"]}
    figures = {name: part["figures"] for name, part in parts.items()}
    verdicts = [
        _verdict(figures.get(name, {}).get(key), goal)
        for name, goals in GOALS.items()
        for key, goal in goals.items()
    ]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("met", "**missed**", "not measured"))
    yield f"{machine['cores']} cores, {machine['cpu']}, {machine['architecture']}. Goals: {counts}."
    yield ""
    yield "| benchmark | figure | goal | measured | | date, commit |"
    yield "|---|---|---|---|---|---|"
    for name, goals in GOALS.items():
        part = parts.get(name, {})
        when = f"{str(part.get('date'))[:10]}, {part.get('commit') or 'unknown'}" if part else ""
        for key, goal in goals.items():
            value = figures.get(name, {}).get(key)
            shown = "" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
            yield f"| {name} | `{key}` | {goal} | {shown} | {_verdict(value, goal)} | {when} |"


def _verdict(value: float | None, goal: Goal) -> str:
    if value is None:
        return "not measured"
    return "met" if goal.is_met(value) else "**missed**"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), render()), encoding="utf-8")
