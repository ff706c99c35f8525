"""What the drift page, the command and the console show about a model, filled by monitoring; and the page: alarms, and
for each column both distributions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Final, Literal

from serin.reports.charts import WIDTH, Axes, Drawing, Scale, number, percent
from serin.reports.page import figures, html_page, meter, table

_CATEGORIES: Final = 10  # shown of a column, the most frequent and those outside their tolerance
_ROW: Final = 22.0
_STATES: Final = {"drifted": "bad", "no alarm yet": "", "no alarm": "good", "no rows": ""}


State = Literal["drifted", "no alarm yet", "no alarm", "no rows"]
"""`no alarm yet`: a share of the last day is beyond its tolerance, and the evidence for drift is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BinView:
    """One bin of a column: its share in training, in the last day, and how much it may differ. `block`: the time over
    which live shares are judged; `judged`: when the open block ends at the earliest (seconds since 1970)."""

    label: str
    then: float
    now: float
    tolerance: float
    block: str | None = None
    judged: float | None = None

    @property
    def beyond(self) -> float:
        """How far the share of the last day is outside the tolerance; 0 within. Alarms are not decided by it."""
        return max(abs(self.now - self.then) - self.tolerance, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmView:
    """`bins`: the shares when the alarm was raised, the most evidence first. `ended`: None while it is open. Times are
    seconds since 1970."""

    column: str
    title: str
    text: str
    severity: str
    segments: tuple[str, ...]
    bins: tuple[BinView, ...]
    rows: int
    since: float
    at: float
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnView:
    """A column or score. `evidence`: of drift, as a share of what an alarm needs, in all rows or the segment with the
    most. `rows`: of the last day. `importance_rank`: 1 is the most important; None when not measured. `nulls`,
    `unseen` and `outside`: shares of null values, of values that training never saw, and of numbers outside the
    training range (training, last day); None where a column has no such bin."""

    name: str
    source: Literal["request", "score"]
    kind: str
    state: State
    evidence: float
    importance_rank: int | None
    importance_share: float | None
    rows: int
    bins: tuple[BinView, ...]
    nulls: tuple[float, float]
    unseen: tuple[float, float] | None = None
    outside: tuple[float, float] | None = None

    @property
    def largest(self) -> BinView | None:
        """The bin whose share differs the most from training, measured by its tolerance. None without rows."""
        if not self.rows:
            return None
        return max(self.bins, key=lambda each: abs(each.now - each.then) / each.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftView:
    """The drift watch of a live release. `rows`: counted since `first`; the newest arrived at `newest`. The last day
    begins at `day_since`. `origin`: where the tolerances come from, `weeks` of training or the `spec`. `columns`:
    drifted ones first, then by evidence and importance."""

    model: str
    release: str
    false_alarms: float
    origin: str
    weeks: int
    training_rows: int
    rows: int
    first: float | None
    newest: float | None
    day_since: float | None
    columns: tuple[ColumnView, ...]
    alarms: tuple[AlarmView, ...]
    past: tuple[AlarmView, ...]


def drift2html(view: DriftView) -> str:
    """Returns the page."""
    drifted = [each.name for each in view.columns if each.state == "drifted"]
    lead = (
        f'<span class="bad">{escape(", ".join(drifted))}</span>: drifted'
        if drifted
        else '<span class="good">no alarm</span>: there is not enough evidence that a column has drifted'
    )
    return html_page(
        f"{view.release}: drift",
        f'<p class="lead">{lead}.</p>{_facts(view)}{_alarms("Open alarms", view.alarms)}{_overview(view)}'
        f'<h2>Columns</h2><p class="note">Pale: training rows. <span class="key">Coloured</span>: live rows of the '
        f"last day. The line across a bar is the range within which a share is not drift. "
        f"A share outside it is marked, and is not an alarm by itself: a few rows differ by chance. Shares are judged "
        f"in blocks of time. The evidence multiplies with each block: it is near 0% until shortly before an alarm.</p>"
        f"<main>{''.join(map(_card, view.columns))}</main>{_alarms('Earlier alarms', view.past)}",
    )


def _facts(view: DriftView) -> str:
    boxes = [
        ("live rows counted", f"{view.rows:,}"),
        ("newest row, UTC", _time(view.newest)),
        ("training rows", f"{view.training_rows:,}"),
        ("columns", f"{len(view.columns)}"),
        ("false alarms accepted", f"{view.false_alarms:g} <small>a year</small>"),
    ]
    origin = (
        f"from how much the {view.weeks} weeks of training differ"
        if view.origin == "weeks"
        else "named by the spec (monitoring.drift.tolerance)"
    )
    note = (
        f"Counted since {_time(view.first)} UTC. The rate of false alarms is over all columns together, however often "
        f"they are looked at. Tolerances: {origin}."
    )
    return f'{figures(boxes)}<p class="note">{escape(note)}</p>'


def _alarms(title: str, alarms: Sequence[AlarmView]) -> str:
    if not alarms:
        return ""
    rows = "".join(
        f'<li><a href="#{escape(each.column, quote=True)}">{escape(each.column)}</a> ({escape(each.severity)}): '
        f"{escape(each.text)}{'' if each.ended is None else f' Ended at {_time(each.ended)} UTC.'}</li>"
        for each in alarms
    )
    return f'<h2>{escape(title)}</h2><ul class="warnings">{rows}</ul>'


def _overview(view: DriftView) -> str:
    titles = ("column", "state", "evidence for an alarm", "importance", "null", "unseen", "outside the range")
    return f'<h2>Overview</h2><div style="overflow-x:auto">{table(titles, map(_line, view.columns))}</div>'


def _line(column: ColumnView) -> str:
    rank = "" if column.importance_rank is None else f"number {column.importance_rank}"
    cells = (
        f'<a href="#{escape(column.name, quote=True)}">{escape(column.name)}</a>',
        f'<span class="{_STATES[column.state]}">{column.state}</span>',
        "" if column.state == "drifted" else meter(column.evidence, "told"),
        rank,
        *(
            _pair(each) if each and column.rows else ""
            for each in (column.nulls, column.unseen, column.outside)
        ),
    )
    return "".join(f'<td class="n">{cell}</td>' for cell in cells)


def _pair(shares: tuple[float, float]) -> str:
    then, now = map(percent, shares)
    return escape(now if then == now else f"{then} → {now}")


def _card(column: ColumnView) -> str:
    facts = [f"{column.rows:,} live rows"]
    if (worst := column.largest) is not None:
        shares = f"{percent(worst.then)} in training, {percent(worst.now)} now"
        facts.append(f"most different: {worst.label}, {shares} (tolerance {percent(worst.tolerance)})")
        if worst.block is not None:
            facts.append(f"judged every {worst.block}")
    what = "score" if column.source == "score" else column.kind
    chart = column_drawing(column)
    return (
        f'<section id="{escape(column.name, quote=True)}"><h3>{escape(column.name)}'
        f'<small class="{_STATES[column.state]}">{column.state}, {escape(what)}</small></h3>'
        f"{chart.embedded(f'{column.name}: training and live distribution')}"
        f"<p>{escape(' · '.join(facts))}</p></section>"
    )


def column_drawing(column: ColumnView) -> Drawing:
    """Draws both distributions of a column: training rows, and live rows of the last day if there are any."""
    draw = _bars if column.kind == "category" else _histogram
    return draw(column.bins, live=column.rows > 0)


def _bars(bins: Sequence[BinView], *, live: bool) -> Drawing:
    """Two bars for each category, one below the other."""
    order = sorted(range(len(bins)), key=lambda place: -max(bins[place].then, bins[place].now))
    chosen = set(order[:_CATEGORIES]) | {place for place in order if bins[place].beyond > 0}
    shown = [
        bins[place]
        for place in order
        if place in chosen and max(bins[place].then, bins[place].now, bins[place].beyond) > 0
    ]
    drawing = Drawing(WIDTH, 8 + _ROW * max(len(shown), 1), font=10.5)
    left, most = 118.0, max((max(each.then, each.now) for each in shown), default=1.0) or 1.0
    x = Scale(0.0, most, left, WIDTH - 96.0)
    for index, each in enumerate(shown):
        top = 4 + index * _ROW
        label = each.label if len(each.label) <= 18 else f"{each.label[:17]}…"
        drawing.text(left - 6, top + 14, label, colour="ink", anchor="end", title=each.label)
        drawing.rect(left, top + 2, max(x(each.then) - left, 0.5), 8, "bar")
        low, high = x(max(each.then - each.tolerance, 0.0)), x(each.then + each.tolerance)
        drawing.line([(low, top + 6), (high, top + 6)], "dim", width=1.2)
        text, beyond = percent(each.then), live and each.beyond > 0
        if live:
            drawing.rect(left, top + 11, max(x(each.now) - left, 0.5), 8, "alarm" if beyond else "line")
            text = f"{text} → {percent(each.now)}"
        drawing.text(WIDTH - 4, top + 14, text, colour="alarm" if beyond else "dim", anchor="end")
    return drawing


def _histogram(bins: Sequence[BinView], *, live: bool) -> Drawing:
    """The bins from left to right: pale bars for training, coloured ones in front of them for live rows."""
    drawing = Drawing(WIDTH, 156, font=10.5)
    most = max((max(each.then + each.tolerance, each.now) for each in bins), default=1.0) or 1.0
    axes = Axes(drawing, Scale(0.0, len(bins), 42.0, WIDTH - 4.0), Scale(0.0, min(most, 1.0), 112.0, 8.0))
    axes.rows((0.0, axes.y.high), percent)
    for place, each in enumerate(bins):
        axes.bar((place, place + 1), (0.0, each.then), "bar", gap=2)
        colour = "alarm" if each.beyond > 0 else "line"
        if live:
            axes.bar((place + 0.25, place + 0.75), (0.0, each.now), colour, gap=1)
        low, high = max(each.then - each.tolerance, 0.0), each.then + each.tolerance
        axes.line([(place + 0.45, low), (place + 0.45, high)], "dim", width=1.1)
        if live:
            hint = f"{each.label}: {percent(each.then)} in training, {percent(each.now)} now"
            axes.dot(place + 0.45, each.now, colour, radius=1.5, title=hint)
    _name_ends(drawing, axes, bins)
    return drawing


def _name_ends(drawing: Drawing, axes: Axes, bins: Sequence[BinView]) -> None:
    """The ends of the ordinary bins, and below them the names of the special ones (below, above, null)."""
    special = [place for place, each in enumerate(bins) if each.label.startswith(("below ", "above "))]
    inner = special[0] if special else len(bins) - 1
    drawing.text(axes.x(0), 126, _short(bins[0].label.partition(" to ")[0]))
    drawing.text(axes.x(inner) - 4, 126, _short(bins[inner - 1].label.rpartition(" to ")[2]), anchor="end")
    for place in range(inner, len(bins)):
        name = bins[place].label.partition(" ")[0]
        drawing.text(axes.x(place + 0.5), 138 + 12 * ((place - inner) % 2), name, anchor="middle")


def _short(label: str) -> str:
    try:
        return number(float(label))
    except ValueError:
        return label


def _time(t: float | None) -> str:
    return "never" if t is None else f"{datetime.fromtimestamp(t, UTC):%Y-%m-%d %H:%M}"
