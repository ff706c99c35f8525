"""report.html: a page about a dataset for people. Distributions, nulls, different values, relation to the target.

Self-contained: no script, no font, no picture from elsewhere. It is no part of the dataset's digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serin.formats.dataset import DatasetDescription
from serin.formats.schema import Kind
from serin.formats.statistics import CategoryStatistics, ColumnStatistics, NumberStatistics
from serin.reports.charts import histogram, moment, number, percent, ranking
from serin.reports.data_report_style import STYLE

FILE = "report.html"
Floats = npt.NDArray[np.float64]
_BARS = 40
_TAIL = 0.01  # of the rows at either end may lie outside the picture


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bins:
    """Rows and target by bin. The last bin holds nulls; of categories, the one before it all other values."""

    edges: Floats | None  # of numbers and times
    values: tuple[str | int, ...]  # of categories
    rows: Floats
    target: Floats  # sums
    squares: Floats
    whole: bool = False  # of numbers: a bin for each whole number, which is its middle

    def means(self) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.target / self.rows)

    def explained(self) -> float:
        """Which share of the target's variance the bins explain; a bin of few rows explains less than it seems to."""
        total = self.rows.sum()
        mean = self.target.sum() / max(total, 1)
        variance = float(self.squares.sum() / max(total, 1) - mean**2)
        used = self.rows > 0
        between = float((self.rows[used] * (self.means()[used] - mean) ** 2).sum() / max(total, 1))
        chance = variance * (used.sum() - 1) / max(total, 1)
        return max(0.0, min(1.0, (between - chance) / variance)) if variance > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """What the page shows. `shown`: whose share is drawn, or that it is the target's mean."""

    description: DatasetDescription
    statistics: Mapping[str, ColumnStatistics]
    bins: Mapping[str, Bins]
    kinds: Mapping[str, Kind]
    sources: Mapping[str, str]  # column -> where it comes from at serving time
    shown: str
    share: float = 1.0  # of the rows that the target is shown for
    warnings: Sequence[str] = ()


def write_report(folder: Path, digest: str, body: str) -> None:
    """The page of the dataset with this digest; `body` as `render` made it."""
    title = f"Dataset {digest[:12]}"
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<header><h1>{title}</h1>{body}</body></html>\n"
    )
    (folder / FILE).write_text(page, encoding="utf-8")


def render(report: Report) -> str:
    """What stands below the title."""
    ordered = sorted(report.bins, key=lambda name: -report.bins[name].explained())
    cards = "\n".join(_card(report, name) for name in ordered)
    return (
        f"{_summary(report)}</header>{_warnings(report.warnings)}{_overview(report, ordered)}"
        f'<h2>Columns</h2><p class="note">Bars: how the training rows are distributed. '
        f'<span class="key">Line and coloured figures</span>: {escape(report.shown)} there'
        f"{_sampled(report.share)}; dashed: over all rows.</p><main>{cards}</main>"
    )


def _sampled(share: float) -> str:
    return "" if share >= 1 else f", in a sample of {percent(share)} of the rows"


def _summary(report: Report) -> str:
    described = report.description
    total = sum(described.rows.values())
    words = {
        "no_partner": "without a partner in an inner join",
        "filtered": "left out by data.where",
        "duplicate": "repeating another",
        "null_target": "without a target",
        "null_time": "without a time",
        "gap": "in the gap between splits",
    }
    dropped = [f"{count:,} {words.get(why, why)}" for why, count in described.dropped.items() if count]
    boxes = [("rows", f"{total:,}")]
    boxes += [
        (name, f"{rows:,} <small>{percent(rows / max(total, 1))}</small>")
        for name, rows in described.rows.items()
    ]
    boxes.append(("features", f"{len(described.numeric) + len(described.categorical):,}"))
    figures = "".join(f"<div><b>{value}</b><span>{escape(name)}</span></div>" for name, value in boxes)
    tables: dict[str, list[int]] = {}
    for source in described.sources:
        tables.setdefault(source.table, []).append(source.size)
    files = ", ".join(
        f"{escape(table)} ({len(sizes)} file{'s' if len(sizes) > 1 else ''}, {number(sum(sizes))}B)"
        for table, sizes in tables.items()
    )
    lost = f"<p>Left out: {escape(', '.join(dropped))}.</p>" if dropped else "<p>No row was left out.</p>"
    return (
        f'<p class="target">Target <code>{escape(described.target)}</code> ({described.task})</p>'
        f'<div class="figures">{figures}</div>{lost}<p>From {files}.</p>'
    )


def _warnings(warnings: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in warnings)
    return f'<ul class="warnings">{items}</ul>' if items else ""


def _overview(report: Report, ordered: Sequence[str]) -> str:
    rows = []
    for name in ordered:
        statistics = report.statistics.get(name)
        bins = report.bins[name]
        nulls = bins.rows[-1] / max(bins.rows.sum(), 1)
        told = bins.explained()
        distinct = f"{statistics.distinct:,}" if isinstance(statistics, CategoryStatistics) else ""
        rows.append(
            f'<tr><td><a href="#{escape(name, quote=True)}">{escape(name)}</a></td><td>{report.kinds[name]}</td>'
            f"<td>{escape(report.sources.get(name, ''))}</td>"
            f'<td class="n">{_meter(nulls, "gap")}</td><td class="n">{distinct}</td>'
            f'<td class="n">{_meter(told, "told")}</td></tr>'
        )
    titles = ("column", "kind", "at serving", "null", "different", "tells of the target")
    head = f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"
    note = (
        '<p class="note">"Tells of the target": the share of its variance that the column alone explains.</p>'
    )
    return f"<h2>Overview</h2>{note}<table>{head}{''.join(rows)}</table>"


def _meter(share: float, kind: str) -> str:
    return (
        f'<span class="meter {kind}"><i style="width:{100 * min(share, 1):.1f}%"></i></span>{percent(share)}'
    )


def _card(report: Report, name: str) -> str:
    bins, statistics = report.bins[name], report.statistics.get(name)
    mean = float(bins.target.sum() / max(bins.rows.sum(), 1))
    show = "number" if report.description.task == "regression" else "share"
    facts = [f"{percent(bins.rows[-1] / max(bins.rows.sum(), 1))} null"]
    if isinstance(statistics, CategoryStatistics):
        facts.append(f"{statistics.distinct:,} different")
        chart = _categories(bins, mean, show)
    else:
        chart, extent = _numbers(bins, statistics, mean, show)
        facts.append(extent)
    null_mean = float(bins.means()[-1]) if bins.rows[-1] else None
    if null_mean is not None:
        facts.append(f"where null: {percent(null_mean) if show == 'share' else number(null_mean)}")
    return (
        f'<section id="{escape(name, quote=True)}"><h3>{escape(name)}<small>{report.kinds[name]}</small></h3>'
        f"{chart}<p>{escape(' · '.join(facts))}</p></section>"
    )


def _categories(bins: Bins, mean: float, show: str) -> str:
    labels = [str(value) for value in bins.values]
    rows, means = bins.rows[:-1], bins.means()[:-1]
    if rows[-1]:
        labels.append("all others")
    else:
        rows, means = rows[:-1], means[:-1]
    return ranking(labels, rows / max(bins.rows.sum(), 1), means, mean, show)


def _numbers(bins: Bins, statistics: ColumnStatistics | None, mean: float, show: str) -> tuple[str, str]:
    assert bins.edges is not None
    shown = number if isinstance(statistics, NumberStatistics) else moment
    if bins.whole:
        low, high = float(bins.edges[0]), float(bins.edges[-1])
        ends = shown(low + 0.5), shown(high - 0.5)
        chart = histogram(bins.rows[:-1], *ends, _line(bins, low, high), mean, show)
        return chart, f"from about {ends[0]} to {ends[1]}"
    if isinstance(statistics, NumberStatistics) and len(statistics.counts):
        edges, up_to = np.asarray(statistics.edges), np.concatenate([[0.0], np.cumsum(statistics.counts)])
    else:
        edges, up_to = bins.edges, np.concatenate([[0.0], np.cumsum(bins.rows[:-1])])
    low, high = _middle(edges, up_to)
    places = np.linspace(low, high, _BARS + 1)
    heights = np.diff(np.interp(places, edges, up_to))
    line = _line(bins, low, high)
    extent = f"from about {shown(float(edges[0]))} to {shown(float(edges[-1]))}"
    return histogram(heights, shown(low), shown(high), line, mean, show), extent


def _middle(edges: Floats, ends: Floats) -> tuple[float, float]:
    """The stretch of the picture: all rows but the outermost, when these lie far out."""
    total = float(ends[-1])
    low, high = (float(np.interp(share * total, ends, edges)) for share in (_TAIL, 1 - _TAIL))
    far = 0.25 * (high - low)
    low = float(edges[0]) if edges[0] >= low - far else low
    high = float(edges[-1]) if edges[-1] <= high + far else high
    return (low, high) if high > low else (low, low + 1.0)


def _line(bins: Bins, low: float, high: float) -> list[tuple[float, float]]:
    assert bins.edges is not None
    middles = (bins.edges[1:] + bins.edges[:-1]) / 2
    means, rows = bins.means()[:-1], bins.rows[:-1]
    fewest = 0.002 * rows.sum()
    width = (high - low) or 1.0  # integers of 2^53 and more: both ends may round to one number
    return [
        (float((middle - low) / width), float(value))
        for middle, value, count in zip(middles, means, rows, strict=True)
        if count > fewest and low <= middle <= high
    ]
