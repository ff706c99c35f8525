"""Writes the result of a search: every trial as a table, the choice as JSON, the importance of settings as a chart."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from serin.machine.durable import write_whole
from serin.reports.search import SearchChart, search_chart
from serin.training.search.study import Tried, objective_name

CHART = "importance.svg"


def write_report(folder: Path, tried: Sequence[Tried], best: Tried, importance: Mapping[str, float]) -> None:
    """Writes trials.csv, result.json and importance.svg to `folder`."""
    write_whole(folder / "trials.csv", trials_csv(tried))
    document = {
        "format": "serin.search",
        "version": 1,
        "settings": best.settings,
        "metrics": best.metrics,
        "trial": best.number,
        "importance": dict(importance),
        "trials": [_row(one) for one in tried],
    }
    write_whole(folder / "result.json", json.dumps(document, indent=1) + "\n")
    write_whole(folder / CHART, search_chart(_chart(tried, best, importance)))


def trials_csv(tried: Sequence[Tried]) -> str:
    paths = sorted({path for one in tried for path in one.settings})
    name = next((objective_name(one.metrics) for one in tried if one.metrics), "valid")
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["trial", "state", name, "seconds", *paths, "reason"])
    for one in tried:
        metric = one.metrics.get(name, "")
        settings = [json.dumps(one.settings[path]) if path in one.settings else "" for path in paths]
        writer.writerow([one.number, one.state, metric, _seconds(one), *settings, one.reason])
    return out.getvalue()


def _chart(tried: Sequence[Tried], best: Tried, importance: Mapping[str, float]) -> SearchChart:
    name = objective_name(best.metrics)
    values = {one.number: one.metrics[name] for one in tried if name in one.metrics and one.value is not None}
    return SearchChart(metric=name, values=values, best=best.number, importance=importance)


def _row(one: Tried) -> dict[str, object]:
    return {
        "trial": one.number,
        "state": one.state,
        "settings": one.settings,
        "metrics": one.metrics,
        "seconds": _seconds(one),
        "reason": one.reason,
    }


def _seconds(one: Tried) -> float | None:
    return None if one.seconds is None else round(one.seconds, 2)
