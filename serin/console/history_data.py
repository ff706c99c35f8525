"""The data of the charts over time, as JSON for the page's chart library."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serin.console.state import Console
from serin.console.views.traffic import SPANS, chosen_span, span_history
from serin.monitoring.history.read import HistoryPoint, HistoryView, SeriesHistory
from serin.reports.svg import SERIES

_ARMS: Final = {"stable": "blue", "candidate": "orange", "baseline": "pale", "pinned": "grey"}
_WHAT: Final = ("latency", "failures", "requests")


def history_data(console: Console) -> Callable[[Request], Awaitable[Response]]:
    async def data(request: Request) -> Response:
        if console.session(request) is None:
            raise HTTPException(401, "log in first")
        what, span = request.query_params.get("what", ""), chosen_span(request.query_params)
        if what not in _WHAT:
            raise HTTPException(404, "there is no such chart")
        found = await run_in_threadpool(chart_data, console.home, request.path_params["model"], what, span)
        return JSONResponse(found)

    return data


def chart_data(home: Path, model: str, what: str, span: str) -> dict[str, Any]:
    """Returns columns of numbers: times first, then one for each line. None breaks a line."""
    found = span_history(home, model, span)
    times = _grid(found, span) if found else []
    lines: list[dict[str, Any]] = []
    columns: list[list[Any]] = [list(times)]
    for series, colour in _coloured(found):
        by_time = {point.t: point for point in series.points}
        for label, value, style in _lines(what, series):
            lines.append({"label": label, "colour": colour, **style})
            columns.append([value(by_time[t]) if t in by_time else None for t in times])
    return {
        "fingerprint": f"{what}:{[line['label'] for line in lines]}",
        "unit": {"latency": " ms", "failures": "%", "requests": ""}[what],
        "zero": what != "latency",
        "log": what == "latency",
        "series": lines,
        "columns": columns,
    }


def _grid(found: HistoryView, span: str) -> list[int]:
    """Returns times at equal distances over the whole span, so that a pause is a gap, and those of other points."""
    times = {point.t for series in found.series for point in series.points}
    if not times:
        return []
    step = SPANS[span][1]
    regular = range(int(found.since) // step * step, int(found.until), step)
    return sorted({*times, *regular})


def _coloured(found: HistoryView | None) -> list[tuple[SeriesHistory, str]]:
    """Returns the series with a colour each: an arm's own for its newest release, others for older ones."""
    spare, taken, coloured = iter(SERIES * 20), set[str](), []
    for series in sorted(found.series if found else (), key=lambda each: -_last(each)):
        colour = _ARMS.get(series.arm, "")
        if not colour or colour in taken:
            colour = next(spare)
        taken.add(colour)
        coloured.append((series, colour))
    return sorted(coloured, key=lambda each: (each[0].release, each[0].arm))


def _last(series: SeriesHistory) -> int:
    return max((point.t for point in series.points), default=0)


def _lines(
    what: str, series: SeriesHistory
) -> list[tuple[str, Callable[[HistoryPoint], float | None], dict[str, Any]]]:
    name = f"{series.release} {series.arm}".strip()
    if what == "latency":
        return [
            (f"{name} p99", lambda point: point.p99_ms, {"width": 2}),
            (f"{name} p50", lambda point: point.p50_ms, {"dash": [3, 4], "width": 1.2}),
        ]
    if what == "failures":
        return [
            (
                name,
                lambda point: 100 * point.errors / point.requests if point.requests else None,
                {"width": 2},
            )
        ]
    return [(f"{name} requests/s", lambda point: point.requests / point.width_s, {"width": 2})]
