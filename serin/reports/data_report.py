"""Renders report.html, the page about a dataset: distributions, nulls, distinct values, relation to the target.

It is not part of the dataset's digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from serin.formats.dataset import DatasetDescription
from serin.formats.schema import Kind
from serin.formats.statistics import CategoryStatistics, ColumnStatistics, NumberStatistics
from serin.reports.charts import WIDTH, Bar, Floats, Form, bars, histogram, moment, number, percent
from serin.reports.page import figures, html_page, meter, table

FILE = "report.html"
_BARS = 40
_LONGEST = 60  # characters of an example
_TAIL = 0.01  # of the rows at either end may be outside the histogram
_HUGE = 1e300  # beyond, differences and sums of values may overflow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bins:
    """Rows and target by bin. The last bin has the nulls; for categories, the one before it has all other values."""

    edges: Floats | None  # of numbers and times
    values: tuple[str | int, ...]  # of categories
    rows: Floats
    target: Floats  # sums
    squares: Floats
    whole: bool = False  # of numbers: one bin per integer, centred on it
    examples: tuple[str | int, ...] = ()  # of an id: some of its values, and there are no bins

    def means(self) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.target / self.rows)

    def explained(self) -> float:
        """The share of the target's variance that the bins explain, corrected for what bins of few rows explain by
        chance."""
        total = self.rows.sum()
        mean = self.target.sum() / max(total, 1)
        variance = float(self.squares.sum() / max(total, 1) - mean**2)
        if not np.isfinite(variance):
            return 0.0
        used = self.rows > 0
        between = float((self.rows[used] * (self.means()[used] - mean) ** 2).sum() / max(total, 1))
        chance = variance * (used.sum() - 1) / max(total, 1)
        return max(0.0, min(1.0, (between - chance) / variance)) if variance > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """The content of the page. `shown` names the figure drawn of the target, such as its mean."""

    description: DatasetDescription
    statistics: Mapping[str, ColumnStatistics]
    bins: Mapping[str, Bins]
    kinds: Mapping[str, Kind]
    sources: Mapping[str, str]  # column -> where it comes from at serving time
    shown: str
    share: float = 1.0  # of the rows that the target is shown for
    warnings: Sequence[str] = ()


def write_report(folder: Path, digest: str, body: str) -> None:
    """Writes the page of the dataset with this digest; `body` is the result of `render`."""
    (folder / FILE).write_text(html_page(f"Dataset {digest[:12]}", body), encoding="utf-8")


def render(report: Report) -> str:
    """Returns the HTML below the title."""
    ordered = sorted(report.bins, key=lambda name: -report.bins[name].explained())
    cards = "\n".join(_card(report, name) for name in ordered)
    return (
        f"<header>{_summary(report)}</header>{_warnings(report.warnings)}{_overview(report, ordered)}"
        f'<h2>Columns</h2><p class="note">Bars: distribution of the training rows. '
        f'<span class="key">Line and coloured figures</span>: {escape(report.shown)} at that value'
        f"{_sampled(report.share)}. Dashed line: over all rows.</p><main>{cards}</main>"
    )


def _sampled(share: float) -> str:
    return "" if share >= 1 else f", in a sample of {percent(share)} of the rows"


def _summary(report: Report) -> str:
    described = report.description
    total = sum(described.rows.values())
    words = {
        "no_partner": "without a match in an inner join",
        "filtered": "excluded by data.where",
        "duplicate": "duplicates",
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
    tables: dict[str, list[int]] = {}
    for source in described.sources:
        tables.setdefault(source.table, []).append(source.size)
    files = ", ".join(
        f"{escape(name)} ({len(sizes)} file{'s' if len(sizes) > 1 else ''}, {number(sum(sizes))}B)"
        for name, sizes in tables.items()
    )
    lost = f"<p>Excluded: {escape(', '.join(dropped))}.</p>" if dropped else "<p>No rows were excluded.</p>"
    return (
        f'<p class="target">Target <code>{escape(described.target)}</code> ({described.task})</p>'
        f"{figures(boxes)}{lost}<p>From {files}.</p>"
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
        explained = bins.explained()
        distinct = f"{statistics.distinct:,}" if isinstance(statistics, CategoryStatistics) else ""
        if bins.examples and report.share >= 1:
            distinct = f"{int(bins.rows[:-1].sum()):,}"
        rows.append(
            f'<td><a href="#{escape(name, quote=True)}">{escape(name)}</a></td><td>{report.kinds[name]}</td>'
            f"<td>{escape(report.sources.get(name, ''))}</td>"
            f'<td class="n">{meter(nulls, "gap")}</td><td class="n">{distinct}</td>'
            f'<td class="n">{meter(explained, "told")}</td>'
        )
    titles = ("column", "kind", "at serving", "null", "distinct", "explains of the target")
    note = '<p class="note">"Explains of the target": the share of its variance that the column explains alone.</p>'
    return f"<h2>Overview</h2>{note}{table(titles, rows)}"


def _card(report: Report, name: str) -> str:
    bins, statistics = report.bins[name], report.statistics.get(name)
    mean = float(bins.target.sum() / max(bins.rows.sum(), 1))
    form = number if report.description.task == "regression" else percent
    facts = [f"{percent(bins.rows[-1] / max(bins.rows.sum(), 1))} null"]
    if isinstance(statistics, CategoryStatistics):
        facts.append(f"{statistics.distinct:,} distinct")
    if bins.examples:
        chart = _identity(bins, report.share)
    elif isinstance(statistics, CategoryStatistics):
        chart = _categories(bins, form)
    else:
        chart, extent = _numbers(bins, statistics, mean, form)
        facts.append(extent)
    if bins.rows[-1]:
        facts.append(f"where null: {form(float(bins.means()[-1]))}")
    return (
        f'<section id="{escape(name, quote=True)}"><h3>{escape(name)}<small>{report.kinds[name]}</small></h3>'
        f"{chart}<p>{escape(' · '.join(facts))}</p></section>"
    )


def _identity(bins: Bins, share: float) -> str:
    """What is shown of an id instead of a distribution, which it does not have."""
    rows = f"{int(bins.rows[:-1].sum()):,} rows{'' if share >= 1 else ' of the sample'}"
    examples = ", ".join(f"<code>{escape(str(value)[:_LONGEST])}</code>" for value in bins.examples)
    return f'<p class="id">An id: every one of {rows} has its own value, such as {examples}.</p>'


def _categories(bins: Bins, form: Form) -> str:
    labels = [str(value) for value in bins.values]
    if bins.rows[-2]:
        labels.append("all others")
    shares = bins.rows / max(bins.rows.sum(), 1)
    rows = [
        Bar(
            label=label,
            value=share,
            text=percent(share),
            note=form(mean) if np.isfinite(mean) else "",
            colour="bar",
        )
        for label, share, mean in zip(labels, shares.tolist(), bins.means().tolist(), strict=False)
    ]
    return bars(rows, width=WIDTH, label=128, row=17).embedded("rows by value")


def _numbers(bins: Bins, statistics: ColumnStatistics | None, mean: float, form: Form) -> tuple[str, str]:
    assert bins.edges is not None
    if isinstance(statistics, NumberStatistics) and len(statistics.counts) and not bins.whole:
        edges, counts = np.asarray(statistics.edges, np.float64), np.asarray(statistics.counts)
    else:
        edges, counts = bins.edges, bins.rows[:-1]
    unit = 2.0**-16 if np.abs(edges).max(initial=0.0) > _HUGE else 1.0
    edges, middles = edges * unit, (bins.edges[1:] * unit + bins.edges[:-1] * unit) / 2

    def shown(value: float) -> str:
        return number(value / unit) if isinstance(statistics, NumberStatistics) else moment(value / unit)

    if bins.whole:
        low, high, heights = float(edges[0]), float(edges[-1]), bins.rows[:-1]
        ends = first, last = shown(low + 0.5), shown(high - 0.5)
    else:
        up_to = np.concatenate([[0.0], np.cumsum(counts)])
        low, high = _middle(edges, up_to)
        heights = np.diff(np.interp(np.linspace(low, high, _BARS + 1), edges, up_to))
        ends, first, last = (shown(low), shown(high)), shown(float(edges[0])), shown(float(edges[-1]))
    chart = histogram(heights, ends, _line(bins, (middles - low) / (high - low)), mean, form)
    return chart.embedded("distribution of values"), f"from about {first} to {last}"


def _middle(edges: Floats, up_to: Floats) -> tuple[float, float]:
    """Returns the range of the histogram: all rows except the outermost when these are far out."""
    total = float(up_to[-1])
    low, high = (float(np.interp(share * total, up_to, edges)) for share in (_TAIL, 1 - _TAIL))
    far = 0.25 * (high - low)
    low = float(edges[0]) if edges[0] >= low - far else low
    high = float(edges[-1]) if edges[-1] <= high + far else high
    return (low, high if high > low else max(low + 1.0, float(np.nextafter(low, np.inf))))


def _line(bins: Bins, places: Floats) -> list[tuple[float, float]]:
    """Returns the target's mean in each bin with enough rows, by its position in the histogram."""
    means, rows = bins.means()[:-1], bins.rows[:-1]
    fewest = 0.002 * rows.sum()
    return [
        (float(place), float(value))
        for place, value, count in zip(places, means, rows, strict=True)
        if count > fewest and 0 <= place <= 1 and np.isfinite(value)
    ]
