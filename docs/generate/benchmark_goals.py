"""Writes the table of goals in docs/benchmarks.md, and that of scaling curves in the history beside the results.

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
HISTORY = RESULTS / "history.md"
BEGIN = "<!-- goals: written by docs/generate/benchmark_goals.py from benchmarks/results -->"
END = "<!-- end of goals -->"
CURVES_BEGIN = "<!-- curves: written by docs/generate/benchmark_goals.py from benchmarks/results -->"
CURVES_END = "<!-- end of curves -->"


def render(results: Path = RESULTS) -> str:
    """Returns one table for each kind of machine without a GPU whose results are committed."""
    tables = ["\n".join(_table(document)) for document in _documents(results)]
    return "\n\n".join(tables) or "No results are committed yet."


def render_curves(results: Path = RESULTS) -> str:
    """Returns one table of curves for each kind of machine that has some."""
    tables = ["\n".join(_curves(document)) for document in _documents(results)]
    return "\n\n".join(table for table in tables if table) or "No curves are committed yet."


def pages(results: Path = RESULTS) -> dict[Path, str]:
    """Returns the pages with their tables as the results have them."""
    curves = (CURVES_BEGIN, CURVES_END)
    return {
        PAGE: updated(PAGE.read_text(encoding="utf-8"), render(results)),
        HISTORY: updated(HISTORY.read_text(encoding="utf-8"), render_curves(results), curves),
    }


def _documents(results: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("cpu-*.json"))]


def updated(page: str, block: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Returns the page with the block between the two comments replaced."""
    begin, end = marks
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end)[1]}"


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
    yield "| benchmark | figure | goal | measured | | date, commit | stolen |"
    yield "|---|---|---|---|---|---|---|"
    for name, goals in GOALS.items():
        part = parts.get(name, {})
        when = f"{str(part.get('date'))[:10]}, {part.get('commit') or 'unknown'}" if part else ""
        stolen = f"{part['stolen']:.1%}" if "stolen" in part else ""
        for key, goal in goals.items():
            value = figures.get(name, {}).get(key)
            shown = "" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
            yield f"| {name} | `{key}` | {goal} | {shown} | {_verdict(value, goal)} | {when} | {stolen} |"


def _curves(document: Mapping[str, Any]) -> Iterator[str]:
    curves = {name: curve for part in document["parts"] for name, curve in part.get("curves", {}).items()}
    if not curves:
        return
    machine = document["machine"]
    yield f"{machine['cores']} cores, {machine['cpu']}, {machine['architecture']}:"
    yield ""
    yield "| curve | what | size: cost | slope at the end | fitted | |"
    yield "|---|---|---|---|---|---|"
    for name, curve in curves.items():
        sizes = sorted(map(int, curve["points"]))
        costs = ", ".join(f"{size:,}: {curve['points'][str(size)]:,.3g}" for size in sizes)
        yield (
            f"| `{name}` | {curve['what']}, {curve['unit']} | {costs} | {curve['slope']:.2f} | {curve['fitted']:.2f} | "
            f"{curve['verdict']} |"
        )


def _verdict(value: float | None, goal: Goal) -> str:
    if value is None:
        return "not measured"
    return "met" if goal.is_met(value) else "**missed**"


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")
