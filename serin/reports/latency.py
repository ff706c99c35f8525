"""The chart of the latency of a model's releases, compared with the promised p99."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from serin.formats.serving.request import Request
from serin.reports.svg import SERIES, Axes, Drawing, Scale, unbroken

_COLOURS: Final = {"stable": "blue", "baseline": "pale", "candidate": "orange", "pinned": "grey"}
_NICE_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_BINS: Final = 60
_PER_BIN: Final = 100  # answers, on average: fewer give a poor p99
_FEW: Final = 10  # a release is not drawn in a bin with fewer of its requests
_MANY: Final = 500  # fewer requests are drawn individually
_ROWS: Final = 4
_PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)
_TIME: Final = (60.0, 740.0)  # left and right of the charts over time
_SHAPE: Final = (810.0, 1120.0)
_UPPER: Final = (400.0, 66.0)  # bottom and top
_LOWER: Final = (560.0, 466.0)

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """The answered requests of one release in one arm, and when its requests failed."""

    name: str
    colour: str
    t: Array  # seconds since the first request
    ms: Array
    failed_t: Array
    all_t: Array


def latency_chart(requests: Sequence[Request], *, p99_ms: float, title: str) -> str:
    """Returns an SVG image: p50 and p99 over time per release, the distribution beside it, traffic and failures
    below."""
    drawing = Drawing(1140, 610)
    drawing.text(20, 30, title, colour="ink", bold=True)
    start = min((request.t for request in requests), default=0.0)
    span_s = max((request.t for request in requests), default=0.0) - start
    series = list(_series(requests, start))
    if any(each.ms.size for each in series):
        _draw(drawing, series, start, span_s, p99_ms)
    else:
        drawing.text(570, 300, "no request was answered", colour="ink", anchor="middle")
    return drawing.standalone()


def _draw(drawing: Drawing, series: list[_Series], start: float, span_s: float, p99_ms: float) -> None:
    everything = np.concatenate([each.ms for each in series])
    low = min(float(np.quantile(everything, 0.01)), p99_ms) * 0.7
    high = max(float(np.quantile(everything, 0.9995)), p99_ms) * 2.2
    y = Scale(low, high, *_UPPER, log=True)  # shared, so that a height means the same in both charts
    over_time = Axes(drawing, Scale(0.0, max(span_s, 1.0), *_TIME), y)
    bins = min(_BINS, everything.size / _PER_BIN)
    bin_s = next((nice for nice in _NICE_S if span_s / nice <= bins), _NICE_S[-1])
    over_time.rows(y.ticks(12), lambda ms: f"{ms:g}")
    if everything.size >= _MANY:
        _draw_quantiles(over_time, series, bin_s)
    else:
        _draw_each(over_time, series)
    said = f"promised p99: {p99_ms:g} ms"
    drawing.text(
        _TIME[1], over_time.limit(p99_ms, "alarm") - 6, said, colour="alarm", anchor="end", halo=True
    )
    _draw_shape(Axes(drawing, Scale(0.0, 3.35, *_SHAPE), y), series, p99_ms)
    _draw_traffic(drawing, over_time.x, series, min(bin_s, max(span_s / 12, 1.0)), start)
    _draw_table(drawing, series)


def _series(requests: Sequence[Request], start: float) -> Iterator[_Series]:
    """Returns stable first, so that a candidate is drawn over it."""
    keys = sorted({(request.arm != "stable", request.arm, request.release) for request in requests})
    spare, taken = iter(SERIES * (len(keys) // len(SERIES) + 1)), set()
    for _, arm, release in keys:
        mine = [request for request in requests if (request.arm, request.release) == (arm, release)]
        colour = _COLOURS.get(arm, "")
        colour = next(spare) if not colour or colour in taken else colour
        taken.add(colour)
        answered = [request for request in mine if request.us is not None]
        yield _Series(
            name=f"v{release.rpartition('-v')[2]} {arm}",
            colour=colour,
            t=np.array([request.t - start for request in answered], dtype=np.float64),
            ms=np.array([max(request.us or 0.0, 1.0) / 1000 for request in answered], dtype=np.float64),
            failed_t=np.array([request.t - start for request in mine if request.failed], dtype=np.float64),
            all_t=np.array([request.t - start for request in mine], dtype=np.float64),
        )


def _draw_quantiles(axes: Axes, series: list[_Series], bin_s: float) -> None:
    """Draws the quantiles over time. A bin without requests breaks the line."""
    said = f"latency in ms: p99 (solid) and p50 (dotted) per {_span(bin_s)}"
    axes.drawing.text(_TIME[0], 54, said, colour="ink")
    for each in series:
        bins = (each.t // bin_s).astype(int)
        found: dict[int, Array] = {}
        for place in np.unique(bins).tolist():
            ms = each.ms[bins == place]
            if ms.size >= _FEW:
                found[place] = np.quantile(ms, (0.5, 0.99))
        if not found:
            continue
        gone = np.full(2, math.nan)
        places = [((b + 0.5) * bin_s, found.get(b, gone)) for b in range(min(found), max(found) + 1)]
        p50, p99 = ([(t, float(both[which])) for t, both in places] for which in (0, 1))
        for under, over in zip(unbroken(p50), unbroken(p99), strict=True):
            axes.area(over, each.colour, under=under, opacity=0.12)
        axes.line(p50, each.colour, width=1.3, dashes="2 3")
        axes.line(p99, each.colour, width=2)
        for t, ms in p99:
            if math.isfinite(ms):
                axes.dot(t, ms, each.colour, radius=1.8)


def _draw_each(axes: Axes, series: list[_Series]) -> None:
    axes.drawing.text(_TIME[0], 54, "latency in ms, each request", colour="ink")
    for each in series:
        for t, ms in zip(each.t.tolist(), each.ms.tolist(), strict=True):
            axes.dot(t, ms, each.colour, radius=2)


def _draw_shape(axes: Axes, series: list[_Series], p99_ms: float) -> None:
    """Draws latency by percentile, on a scale on which p90, p99 and p99.9 are equally far apart."""
    axes.drawing.text(_SHAPE[0], 54, "by percentile", colour="ink")
    axes.columns([_nines(each) for each in _PERCENTILES], lambda nines: f"p{100 * (1 - 10**-nines):.4g}")
    axes.limit(p99_ms, "alarm")
    for each in series:
        if each.ms.size < _FEW:
            continue
        last = min(_nines(100 * (1 - 1 / each.ms.size)), 3.3)
        nines = np.linspace(0.0, last, 80)
        values = np.quantile(each.ms, 1 - 10**-nines)
        axes.line(list(zip(nines.tolist(), values.tolist(), strict=True)), each.colour, width=1.9)
        if last >= 2:
            axes.dot(2.0, float(np.quantile(each.ms, 0.99)), each.colour, radius=3.5)


def _nines(percentile: float) -> float:
    """Counts the nines of a percentile: p90 -> 1, p99 -> 2, p99.9 -> 3."""
    return -math.log10(1 - percentile / 100)


def _draw_traffic(drawing: Drawing, x: Scale, series: list[_Series], bin_s: float, start: float) -> None:
    edges = np.arange(0, (math.floor(x.high / bin_s) + 2) * bin_s, bin_s)
    rates = [np.histogram(each.all_t, edges)[0] / bin_s for each in series]
    below, most = np.zeros(len(edges) - 1), float(sum(rates, np.zeros(1)).max())
    axes = Axes(drawing, x, Scale(0.0, most * 1.2 or 1.0, *_LOWER))
    axes.rows(axes.y.ticks(3), lambda rate: f"{rate:g}")
    for each, rate in zip(series, rates, strict=True):
        for left, low, high in zip(edges.tolist(), below.tolist(), (below + rate).tolist(), strict=False):
            if high > low:
                axes.bar((left, left + bin_s), (low, high), each.colour, gap=0.5, opacity=0.75)
        below = below + rate
    failed = np.concatenate([each.failed_t for each in series])
    for place in np.flatnonzero(np.histogram(failed, edges)[0]).tolist():
        axes.dot((place + 0.5) * bin_s, most * 1.13, "alarm")
    said = f"requests/s ({failed.size} failed: red dots)" if failed.size else "requests/s"
    drawing.text(_TIME[0], 452, said, colour="ink")
    tick_s = next((nice for nice in _NICE_S if x.high / nice <= 8), _NICE_S[-1])
    clock = np.arange(-start % tick_s, x.high, tick_s).tolist()
    axes.columns(clock, lambda t: f"{datetime.fromtimestamp(start + t, UTC):%H:%M:%S}", lines=False)
    day = f"UTC, {datetime.fromtimestamp(start, UTC):%Y-%m-%d}"
    drawing.text((x.first + x.last) / 2, 600, day, anchor="middle")


def _draw_table(drawing: Drawing, series: list[_Series]) -> None:
    """Draws the legend, with the figures of the whole time."""
    places = (960.0, 1010.0, 1060.0, 1120.0)
    for place, head in zip(places, ("p50", "p95", "p99", "failed"), strict=True):
        drawing.text(place, 466, head, anchor="end")
    for row, each in enumerate(series[:_ROWS]):
        base = 490 + 22 * row
        drawing.rect(_SHAPE[0] - 18, base - 6, 14, 4, each.colour)
        drawing.text(_SHAPE[0], base, each.name, colour="ink")
        quantiles = np.quantile(each.ms, (0.5, 0.95, 0.99)).tolist() if each.ms.size else ()
        cells = [f"{value:.3g}" for value in quantiles] or ["-"] * 3
        for place, cell in zip(places, (*cells, f"{each.failed_t.size / each.all_t.size:.2%}"), strict=True):
            drawing.text(place, base, cell, colour="ink", anchor="end")
    if len(series) > _ROWS:
        drawing.text(_SHAPE[0], 490 + 22 * _ROWS, f"and {len(series) - _ROWS} more")


def _span(seconds: float) -> str:
    if seconds % 3600 == 0:
        return f"{seconds / 3600:g} h"
    return f"{seconds / 60:g} min" if seconds % 60 == 0 else f"{seconds:g} s"
