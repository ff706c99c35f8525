"""A picture of how fast a model's releases answered, against what was promised. Drawn without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from serin.formats.serving.request import Request

_COLOURS: Final = {"stable": "#1f5fa8", "baseline": "#6c8fb5", "candidate": "#d9731a", "pinned": "#7a7a7a"}
_MORE: Final = ("#2a8c6a", "#8a4fa3", "#b0413e", "#8c7a1f")
_INK, _FAINT, _PROMISE = "#22272e", "#d8dde3", "#b3261e"
_NICE_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_BINS: Final = 60
_PER_BIN: Final = 100  # answers, on average: fewer make a poor p99
_FEW: Final = 10  # a bin with fewer of a release shows nothing of it
_MANY: Final = 500  # fewer requests are drawn one by one
_ROWS: Final = 4
_PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The answered requests of one release in one arm, and when its requests failed."""

    name: str
    colour: str
    t: np.ndarray[Any, np.dtype[np.float64]]  # seconds since the picture's start
    ms: np.ndarray[Any, np.dtype[np.float64]]
    failed_t: np.ndarray[Any, np.dtype[np.float64]]
    all_t: np.ndarray[Any, np.dtype[np.float64]]


def latency_picture(requests: Sequence[Request], *, p99_ms: float, title: str) -> bytes:
    """A PNG: p50 and p99 over time per release, the whole distribution beside it, traffic and failures below."""
    figure = Figure(figsize=(11.5, 6.2), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=_INK)
    start = min((request.t for request in requests), default=0.0)
    span_s = max((request.t for request in requests), default=0.0) - start
    lines = list(_lines(requests, start))
    if any(line.ms.size for line in lines):
        _draw(figure, lines, start, span_s, p99_ms)
    else:
        figure.text(0.5, 0.5, "no request was answered", ha="center", fontsize=12, color=_INK)
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


def _draw(figure: Figure, lines: list[_Line], start: float, span_s: float, p99_ms: float) -> None:
    grid = figure.add_gridspec(2, 2, width_ratios=(2.3, 1), height_ratios=(3, 1))
    over_time, shape = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    traffic, table = figure.add_subplot(grid[1, 0], sharex=over_time), figure.add_subplot(grid[1, 1])
    for axes in (over_time, shape, traffic):
        _dress(axes)
    answered = sum(line.ms.size for line in lines)
    bins = min(_BINS, answered / _PER_BIN)
    bin_s = next((nice for nice in _NICE_S if span_s / nice <= bins), _NICE_S[-1])
    if answered >= _MANY:
        _draw_quantiles(over_time, lines, bin_s)
    else:
        _draw_each(over_time, lines)
    _draw_promise(over_time, p99_ms)
    _draw_shape(shape, lines, p99_ms)
    _draw_traffic(traffic, lines, min(bin_s, max(span_s / 12, 1.0)), span_s)
    _draw_table(table, lines)
    _scale(over_time, shape, lines, p99_ms)
    _clock(traffic, start, span_s)
    over_time.tick_params(labelbottom=False)


def _lines(requests: Sequence[Request], start: float) -> Iterator[_Line]:
    """Stable first, so that a candidate is drawn over it."""
    keys = sorted({(request.arm != "stable", request.arm, request.release) for request in requests})
    spare, taken = iter(_MORE * (len(keys) // len(_MORE) + 1)), set()
    for _, arm, release in keys:
        mine = [request for request in requests if (request.arm, request.release) == (arm, release)]
        colour = _COLOURS.get(arm, "")
        colour = next(spare) if not colour or colour in taken else colour
        taken.add(colour)
        answered = [request for request in mine if request.us is not None]
        yield _Line(
            name=f"v{release.rpartition('-v')[2]} {arm}",
            colour=colour,
            t=np.array([request.t - start for request in answered], dtype=np.float64),
            ms=np.array([max(request.us or 0.0, 1.0) / 1000 for request in answered], dtype=np.float64),
            failed_t=np.array([request.t - start for request in mine if request.failed], dtype=np.float64),
            all_t=np.array([request.t - start for request in mine], dtype=np.float64),
        )


def _draw_quantiles(axes: Axes, lines: list[_Line], bin_s: float) -> None:
    for line in lines:
        bins = (line.t // bin_s).astype(int)
        found = [(b, line.ms[bins == b]) for b in np.unique(bins)]
        rows = np.array(
            [[(b + 0.5) * bin_s, *np.quantile(ms, (0.5, 0.99))] for b, ms in found if ms.size >= _FEW]
        )
        if not len(rows):
            continue
        at, p50, p99 = _with_gaps(rows, bin_s)
        axes.fill_between(at, p50, p99, color=line.colour, alpha=0.12, linewidth=0)
        axes.plot(at, p99, color=line.colour, linewidth=1.9, marker="o", markersize=2.4)
        axes.plot(at, p50, color=line.colour, linewidth=1.2, linestyle=(0, (1, 1.2)))
    axes.set_title(f"latency in ms: p99 (solid) and p50 (dotted) per {_span(bin_s)}", loc="left", fontsize=10)


def _draw_each(axes: Axes, lines: list[_Line]) -> None:
    """So few that each can be shown, and quantiles per moment would be noise."""
    for line in lines:
        axes.scatter(line.t, line.ms, s=13, color=line.colour, alpha=0.75, linewidth=0)
    axes.set_title("latency in ms, each request", loc="left", fontsize=10)


def _draw_promise(axes: Axes, p99_ms: float) -> None:
    axes.axhline(p99_ms, color=_PROMISE, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.annotate(
        f"promised p99: {p99_ms:g} ms",
        (0.995, p99_ms),
        xycoords=("axes fraction", "data"),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color=_PROMISE,
        bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},
    )


def _with_gaps(rows: np.ndarray[Any, Any], bin_s: float) -> tuple[np.ndarray[Any, Any], ...]:
    """A bin without requests breaks the line: nothing was seen there."""
    breaks = np.flatnonzero(np.diff(rows[:, 0]) > 1.5 * bin_s) + 1
    gaps = np.insert(rows, breaks, np.nan, axis=0)
    return gaps[:, 0], gaps[:, 1], gaps[:, 2]


def _draw_shape(axes: Axes, lines: list[_Line], p99_ms: float) -> None:
    """Latency at each percentile; the scale gives the tail the room it has in a promise."""
    for line in lines:
        if line.ms.size < _FEW:
            continue
        last = 100 * (1 - 1 / line.ms.size)
        percentiles = 100 * (1 - np.logspace(0, math.log10(max(1 - min(last, 99.95) / 100, 1e-6)), 160))
        values = np.quantile(line.ms, percentiles / 100)
        axes.plot(_nines(percentiles), values, color=line.colour, linewidth=1.9)
        p99 = float(np.quantile(line.ms, 0.99))
        if last >= 99:
            axes.plot(_nines(np.array([99.0])), [p99], "o", color=line.colour, markersize=5)
    axes.axhline(p99_ms, color=_PROMISE, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.axvline(_nines(np.array([99.0]))[0], color=_PROMISE, linewidth=0.8, alpha=0.45)
    axes.xaxis.set_major_locator(FixedLocator(_nines(np.array(_PERCENTILES)).tolist()))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda _, i: f"p{_PERCENTILES[i or 0]:g}"))
    axes.set_xlim(0, 3.35)
    axes.set_title("by percentile", loc="left", fontsize=10)


def _nines(percentiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """p90 -> 1, p99 -> 2, p99.9 -> 3."""
    return -np.log10(np.maximum(1 - percentiles / 100, 1e-9))


def _draw_traffic(axes: Axes, lines: list[_Line], bin_s: float, span_s: float) -> None:
    edges = np.arange(0, (math.floor(span_s / bin_s) + 2) * bin_s, bin_s)
    rates = [np.histogram(line.all_t, edges)[0] / bin_s for line in lines]
    middles = edges[:-1]
    bottom = np.zeros(len(middles))
    for line, rate in zip(lines, rates, strict=True):
        axes.bar(
            middles,
            rate,
            width=bin_s,
            bottom=bottom,
            align="edge",
            color=line.colour,
            alpha=0.75,
            linewidth=0,
        )
        bottom += rate
    failures = np.concatenate([line.failed_t for line in lines])
    label = "requests/s"
    if failures.size:
        counts = np.histogram(failures, edges)[0]
        hit = counts > 0
        top = np.full(hit.sum(), bottom.max() * 1.13)
        axes.scatter(middles[hit] + bin_s / 2, top, marker="v", s=18, color=_PROMISE, linewidth=0)
        label += f"  (▼ {failures.size} failed)"
    axes.set_title(label, loc="left", fontsize=10)
    axes.set_ylim(0, max(bottom.max() * 1.28, 1e-9))
    axes.set_xlim(0, max(span_s, bin_s))


def _draw_table(axes: Axes, lines: list[_Line]) -> None:
    """The legend, with the numbers of the whole picture."""
    axes.axis("off")
    places = (0.60, 0.735, 0.87, 1.0)
    for place, head in zip(places, ("p50", "p95", "p99", "failed"), strict=True):
        axes.text(place, 1.0, head, ha="right", va="top", fontsize=8.5, color="#6b7480")
    for row, line in enumerate(lines[:_ROWS]):
        height = 0.80 - 0.2 * row
        axes.plot([0.0, 0.045], [height - 0.05] * 2, color=line.colour, linewidth=2.6, clip_on=False)
        axes.text(0.065, height, line.name, va="top", fontsize=8.5, color=_INK)
        quantiles = np.quantile(line.ms, (0.5, 0.95, 0.99)) if line.ms.size else ()
        cells = [f"{value:.3g}" for value in quantiles] or ["-"] * 3
        cells.append(f"{line.failed_t.size / line.all_t.size:.2%}")
        for place, cell in zip(places, cells, strict=True):
            axes.text(place, height, cell, ha="right", va="top", fontsize=8.5, color=_INK)
    if len(lines) > _ROWS:
        axes.text(0.065, 0.80 - 0.2 * _ROWS, f"and {len(lines) - _ROWS} more", va="top", fontsize=8.5)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def _scale(over_time: Axes, shape: Axes, lines: list[_Line], p99_ms: float) -> None:
    """One logarithmic scale for both, so that a height means the same in each."""
    everything = np.concatenate([line.ms for line in lines])
    low = min(float(np.quantile(everything, 0.01)), p99_ms) * 0.7
    high = max(float(np.quantile(everything, 0.9995)), p99_ms) * 2.2
    for axes in (over_time, shape):
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())


def _clock(axes: Axes, start: float, span_s: float) -> None:
    tick_s = next((nice for nice in _NICE_S if span_s / nice <= 8), _NICE_S[-1])
    first = -start % tick_s
    axes.xaxis.set_major_locator(FixedLocator(np.arange(first, max(span_s, 1.0), tick_s).tolist()))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{datetime.fromtimestamp(start + value, UTC):%H:%M:%S}")
    )
    axes.set_xlabel(f"UTC, {datetime.fromtimestamp(start, UTC):%Y-%m-%d}", fontsize=9, color=_INK)


def _dress(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.grid(True, axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.title.set_color(_INK)


def _span(seconds: float) -> str:
    if seconds % 3600 == 0:
        return f"{seconds / 3600:g} h"
    return f"{seconds / 60:g} min" if seconds % 60 == 0 else f"{seconds:g} s"
