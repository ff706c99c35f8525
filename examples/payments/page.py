"""The page that tells the story: figures and pictures of what was recorded, as one HTML file without script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from serin.metrics import auc
from serin.reports.charts import Axes, Drawing, Scale
from serin.reports.page import figures, html_page, table

REFUSED_AT = 0.5
"""The bank refuses a payment whose score is at least this."""
WINDOWS = ("payments_1h", "spent_1h", "payments_1d", "spent_1d", "largest_1d")
_WIDTH, _LEFT, _RIGHT = 920.0, 64.0, 900.0
_BEFORE_S = 2.0  # seconds before the canary that its picture shows
_STYLE = (
    "<style>section{margin:14px 0;padding:14px 18px 12px}section h2{margin-top:2px}"
    "section p{font-size:14px;max-width:920px;margin-bottom:10px}"
    "section{overflow-x:auto}td,th{padding:6px 8px}</style>"
)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the page shows. `rows`: recorded requests with the truth, by time; `day` is that of the simulation, and
    `seconds` those since the first request. `marks`: names of events with their days. `equal`: windows that were
    compared, and how many differ. `alarm`: the alert's title and text. `reason`: the answer of `serin explain` for
    `refused`, one of the rows. `before`: what version 1 would have answered to the rows of version 2."""

    rows: pd.DataFrame
    marks: Mapping[str, float]
    failures: int
    equal: tuple[int, int]
    seconds: float
    alarm: tuple[str, str] | None = None
    refused: pd.Series | None = None
    reason: Mapping[str, Any] | None = None
    before: np.ndarray | None = None
    report: str | None = None


def payments_page(told: Told) -> str:
    parts = [_STYLE, _head(told), _stopped(told)]
    if told.refused is not None:
        parts += [_card(told), _reason(told)]
    parts += [_merchants(told)] if "lookup refreshed" in told.marks else []
    parts += [_alarm(told)] if told.alarm else []
    parts += [_canary(told)] if told.report else []
    parts += [_latency(told)]
    parts += [_gain(told)] if told.before is not None else []
    return html_page("Payments: the story of a fraud model", "".join([*parts, _NOTES]))


def caught(rows: pd.DataFrame, scores: pd.Series | np.ndarray) -> float:
    """The share of the frauds that are refused; NaN without frauds."""
    return (
        float((scores >= REFUSED_AT)[rows["fraud"].to_numpy()].mean())
        if rows["fraud"].any()
        else float("nan")
    )


def disturbed(rows: pd.DataFrame, scores: pd.Series | np.ndarray) -> float:
    """The share of the honest payments that are refused."""
    return float((scores >= REFUSED_AT)[~rows["fraud"].to_numpy()].mean())


def _head(told: Told) -> str:
    rows, (windows, different) = told.rows, told.equal
    lead = (
        "A bank asks a model about each payment while the customer waits. One spec describes the model, its windows "
        "over the past hour and day, its table of merchants, its canary and its watch. Everything below was recorded "
        "by the stack while the payments of some months were replayed."
    )
    boxes = [
        ("payments answered", f"{len(rows):,}"),
        ("requests failed", f"{told.failures:,}"),
        ("p99 at the gateway", f"{rows['_latency_ms'].quantile(0.99):.1f} <small>ms</small>"),
        ("window values served", f"{windows:,}"),
        ("of them not the table's", f"{different:,}"),
        ("for all of it", f"{told.seconds:.0f} <small>s</small>"),
    ]
    return f'<p class="lead">{lead}</p>{figures(boxes)}'


def _section(title: str, text: str, *content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{text}</p>{''.join(content)}</section>"


def _axes(
    drawing: Drawing, days: tuple[float, float], high: float, *, top: float = 34, low: float = 0.0
) -> Axes:
    return Axes(drawing, Scale(*days, _LEFT, _RIGHT), Scale(low, high, drawing.height - 30, top))


def _days(told: Told) -> tuple[float, float]:
    return float(np.floor(told.rows["day"].min())), float(np.ceil(told.rows["day"].max()))


def _marks(axes: Axes, marks: Mapping[str, float]) -> None:
    """Draws a line for each event, with its name on one of two rows above."""
    for place, (name, day) in enumerate(sorted(marks.items(), key=lambda mark: mark[1])):
        x, colour = axes.x(day), "alarm" if name in ("change", "alarm") else "good"
        axes.drawing.line([(x, axes.y.first), (x, axes.y.last - 4)], colour, width=1.2, dashes="4 3")
        axes.drawing.text(x, 12 + 13 * (place % 2), name, colour=colour, anchor="middle", halo=True)


def _by_days(rows: pd.DataFrame, size: float) -> list[tuple[float, pd.DataFrame]]:
    """The rows in groups of so many days, each with the middle of its days."""
    number = np.floor((rows["day"] - np.floor(rows["day"].min())) / size)
    return [(float(part["day"].mean()), part) for _, part in rows.groupby(number)]


def _share_axes(drawing: Drawing, told: Told, high: float = 1.0) -> Axes:
    axes = _axes(drawing, _days(told), high)
    axes.rows(axes.y.ticks(5), lambda value: f"{value:.0%}")
    axes.columns(axes.x.ticks(12), lambda value: f"day {value:g}", lines=False)
    return axes


def _stopped(told: Told) -> str:
    drawing = Drawing(_WIDTH, 250)
    axes, parts = _share_axes(drawing, told), _by_days(told.rows, 3)
    lines = {
        "frauds that were refused": ("blue", [(day, caught(part, part["score"])) for day, part in parts]),
        "honest payments that were refused": (
            "orange",
            [(day, disturbed(part, part["score"])) for day, part in parts],
        ),
    }
    for name, (colour, points) in lines.items():
        axes.line(points, colour, width=2.2, title=name)
        for x, y in points:
            if np.isfinite(y):
                axes.dot(x, y, colour, title=f"{name}: {y:.1%} around day {x:.0f}")
    _marks(axes, told.marks)
    text = (
        f'<b style="color:var(--blue)">Frauds that were refused</b> and <b style="color:var(--orange)">honest payments '
        f"that were refused</b>, in groups of three days. A payment is refused when its score is {REFUSED_AT} or more. "
        "Labels come two to six days later, so nobody knows this curve on the day itself."
    )
    return _section("What was stopped", text, drawing.embedded("Share of frauds refused, by day"))


def _card(told: Told) -> str:
    assert told.refused is not None
    card, day = told.refused["card"], told.refused["day"]
    near = told.rows[(told.rows["card"] == card) & (told.rows["day"].between(day - 1, day + 0.05))]
    head = ("time", "merchant", "channel", "amount", *WINDOWS, "score", "answer", "the truth")
    cells = []
    for _, row in near.tail(12).iterrows():
        windows = "".join(f'<td class="n">{_plain(row[name])}</td>' for name in WINDOWS)
        refused = (
            '<td class="bad">refused</td>' if row["score"] >= REFUSED_AT else '<td class="good">paid</td>'
        )
        cells.append(
            f'<td class="n">{row["at"]:%d %b %H:%M}</td><td>{escape(row["merchant"])}</td>'
            f"<td>{escape(row['channel'])}</td>"
            f'<td class="n">{row["amount"]:.2f}</td>{windows}<td class="n">{row["score"]:.3f}</td>{refused}'
            f"<td>{'fraud' if row['fraud'] else 'honest'}</td>"
        )
    text = (
        f"Card {escape(card)}: its last payments within a day. The terminals send the first four columns, the card and "
        "the payment's id. The gateway adds the windows before the model sees the request. "
        f"{told.equal[0]:,} such values were compared with those that the whole table gives: "
        f"{told.equal[1]:,} differ."
    )
    return _section("The windows of one card", text, _card_picture(near, told.refused), table(head, cells))


def _card_picture(near: pd.DataFrame, refused: pd.Series) -> str:
    """The hour of the refused payment: what each payment found in the windows."""
    drawing = Drawing(_WIDTH, 190)
    minutes = (near["at"] - refused["at"]).dt.total_seconds() / 60
    hour = near[minutes >= -60]
    xs = minutes[minutes >= -60].tolist()
    axes = _axes(drawing, (-60.0, 5.0), max(float(hour["payments_1h"].max()), 1.0) + 1, top=14)
    axes.rows(axes.y.ticks(5), lambda value: f"{value:g}")
    axes.columns(axes.x.ticks(8), lambda value: f"{value:g} min", lines=False)
    for x, row in zip(xs, (row for _, row in hour.iterrows()), strict=True):
        colour = "alarm" if row["score"] >= REFUSED_AT else "good"
        axes.bar((x - 0.4, x + 0.4), (0.0, float(row["payments_1h"])), colour, opacity=0.55)
        axes.dot(
            x, float(row["payments_1h"]), colour, radius=4, title=f"{row['amount']:.2f} at {row['merchant']}"
        )
        drawing.text(
            axes.x(x), axes.y(float(row["payments_1h"])) - 8, f"{row['amount']:.2f}", anchor="middle"
        )
    return drawing.embedded("Payments of the card within the hour before, at each payment")


def _plain(value: Any) -> str:
    if value is None or pd.isna(value):
        return "-"
    return f"{value:.2f}".removesuffix(".00")


def _reason(told: Told) -> str:
    assert told.refused is not None
    assert told.reason is not None
    found: list[tuple[str, float]] = sorted(
        told.reason["contributions"].items(), key=lambda each: -abs(each[1])
    )
    drawing = Drawing(_WIDTH, 16 + 26 * len(found))
    most = max(abs(value) for _, value in found)
    x = Scale(-most, most, 330, 800)
    for number, (name, value) in enumerate(found):
        top, colour = 8 + 26 * number, "alarm" if value > 0 else "good"
        left, right = sorted((x(0), x(value)))
        drawing.text(160, top + 16, name, colour="ink", anchor="end")
        drawing.text(172, top + 16, str(told.reason["values"].get(name, "")))
        drawing.rect(left, top + 3, max(right - left, 1), 18, colour, opacity=0.8)
        place = right + 6 if value > 0 else left - 6
        drawing.text(place, top + 16, f"{value:+.2f}", anchor="start" if value > 0 else "end")
    row = told.refused
    text = (
        f"Payment {escape(row['payment'])} of {row['amount']:.2f} at {escape(row['merchant'])} got the score "
        f"{row['score']:.3f} from {escape(row['_release'])} and was refused. <code>serin explain</code> divides the "
        "answer among the raw columns, in log-odds: those to the right speak for a fraud. They and the base "
        f"({told.reason['base']:+.2f}) add up to {told.reason['margin']:+.2f}."
    )
    return _section(
        "The reason of one refusal", text, drawing.embedded("Contribution of each column to the score")
    )


def _merchants(told: Told) -> str:
    """Frauds at the merchants that became risky while the model was live."""
    rows = told.rows[told.rows["taken_over"] & told.rows["fraud"] & (told.rows["channel"] == "online")]
    end = told.marks.get("change", np.inf)
    rows = rows[rows["day"] < end]
    drawing = Drawing(_WIDTH, 200)
    axes = _axes(drawing, (_days(told)[0], min(end, _days(told)[1])), 1.0)
    axes.rows(axes.y.ticks(5), lambda value: f"{value:g}")
    axes.columns(axes.x.ticks(12), lambda value: f"day {value:g}", lines=False)
    axes.limit(REFUSED_AT, "grey")
    for _, row in rows.iterrows():
        old = row["_release"].endswith("-v1")
        axes.dot(row["day"], row["score"], "pale" if old else "blue", radius=3.5, title=f"{row['score']:.3f}")
    _marks(axes, {name: day for name, day in told.marks.items() if name == "lookup refreshed"})
    editions = [(name, part) for name, part in rows.groupby("_release")]
    means = "; ".join(
        f"{escape(str(name))}: {caught(part, part['score']):.0%} of {len(part)} refused"
        for name, part in editions
    )
    text = (
        "Thieves moved to merchants whose payments were seldom disputed before. The model looks the risk up in a "
        "table that is part of its release. <code>serin lookups refresh</code> read the new table, proved the edition "
        "and switched to it while payments were answered; nothing was trained. The dots are the scores of frauds "
        f"there. {means}."
    )
    return _section(
        "The list of merchants is read again", text, drawing.embedded("Scores of frauds at these merchants")
    )


def _alarm(told: Told) -> str:
    assert told.alarm is not None
    drawing = Drawing(_WIDTH, 200)
    parts = _by_days(told.rows, 1)
    points = [(day, float((part["channel"] == "wallet").mean())) for day, part in parts]
    axes = _share_axes(drawing, told, high=0.6)
    axes.area(points, "purple")
    axes.line(points, "purple", width=2)
    _marks(axes, told.marks)
    title, text = told.alarm
    shown = re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))
    words = (
        '<b style="color:var(--purple)">The share of payments by wallet</b>. Training never had this value. The alarm '
        "needs no label: it compares what clients send with the training rows, and its rate of false alarms is one per "
        f"year. It said: <b>{escape(title)}</b>. {shown}"
    )
    return _section("The alarm", words, drawing.embedded("Share of payments by wallet, by day"))


def _canary(told: Told) -> str:
    newer = told.rows["_release"].str.contains("-v2")
    first = max(told.rows["seconds"][newer].min() - _BEFORE_S, told.rows["seconds"].min())
    rows = told.rows[told.rows["seconds"] >= first]
    seconds = np.floor(rows["seconds"] - first)
    drawing = Drawing(_WIDTH, 220)
    share = newer[rows.index].groupby(seconds).mean()
    axes = _axes(drawing, (0.0, float(seconds.max()) + 1), 1.0, top=14)
    axes.rows(axes.y.ticks(5), lambda value: f"{value:.0%}")
    axes.columns(axes.x.ticks(12), lambda value: f"{value:g} s", lines=False)
    for second, value in share.items():
        axes.bar((second, second + 1), (0.0, value), "good", opacity=0.75)
    arms = rows[seconds <= share[share < 1].index.max()] if (share < 1).any() else rows
    cells = [
        f'<td>{escape(str(name))}</td><td class="n">{len(part):,}</td>'
        f'<td class="n">{part["_latency_ms"].quantile(0.5):.1f} ms</td>'
        f'<td class="n">{part["_latency_ms"].quantile(0.99):.1f} ms</td>'
        for name, part in arms.groupby("_release")
    ]
    link = (
        f' The <a href="{escape(told.report)}">report of the rollout</a> has all evidence.'
        if told.report
        else ""
    )
    text = (
        "The alarm started the retraining: the same spec, and the bank's table of that day. The new version was "
        'compared with the live one on the newest payments, then it got <b style="color:var(--good)">a share of the '
        "traffic</b>: 10%, 50%, all. Each step waits for evidence about errors and latency. Both versions read the "
        f"same windows, and each payment counts once.{link}"
    )
    head = ("release, while both answered", "payments", "p50", "p99")
    return _section(
        "The canary", text, drawing.embedded("Share of requests answered by version 2"), table(head, cells)
    )


def _latency(told: Told) -> str:
    rows = told.rows
    drawing = Drawing(_WIDTH, 200)
    group = np.floor(rows["seconds"] / 5)
    high = float(rows["_latency_ms"].groupby(group).quantile(0.99).max())
    axes = _axes(drawing, (0.0, float(rows["seconds"].max())), high * 1.1, top=14)
    axes.rows(axes.y.ticks(5), lambda value: f"{value:g} ms")
    axes.columns(axes.x.ticks(12), lambda value: f"{value:g} s", lines=False)
    for quantile, colour in ((0.5, "sky"), (0.99, "blue")):
        found = rows["_latency_ms"].groupby(group).quantile(quantile).reindex(np.arange(group.max() + 1))
        points = [(5 * float(at) + 2.5, float(value)) for at, value in found.items()]
        axes.line(points, colour, width=2, title=f"p{100 * quantile:g}")
    rate = len(rows) / max(len(group.unique()) * 5, 1)
    text = (
        'The gateway\'s <b style="color:var(--blue)">p99</b> and <b style="color:var(--sky)">p50</b> over the seconds '
        f"of the replay, about {rate:.0f} payments per second: windows, model and answer, on a machine that also runs "
        "Prefect, the training, the commands and the clients. A gap is the time of the retraining, in which the replay "
        "waits."
    )
    return _section("How long an answer takes", text, drawing.embedded("Latency over time"))


def _gain(told: Told) -> str:
    assert told.before is not None
    rows = told.rows[told.rows["_release"].str.contains("-v2")]
    both = {"version 1": told.before, "version 2": rows["score"].to_numpy()}
    truth = rows["fraud"].to_numpy()
    money = rows["amount"].to_numpy() * truth
    cells = [
        f'<td>{name}</td><td class="n">{caught(rows, scores):.1%}</td><td class="n">{disturbed(rows, scores):.2%}</td>'
        f'<td class="n">{money[scores >= REFUSED_AT].sum() / max(money.sum(), 1e-9):.1%}</td>'
        f'<td class="n">{auc(truth, scores):.4f}</td><td class="n">{((scores - truth) ** 2).mean():.4f}</td>'
        for name, scores in both.items()
    ]
    head = ("", "frauds refused", "honest payments refused", "stolen money kept", "AUC", "Brier score")
    text = (
        f"The {len(rows):,} payments that version 2 answered, and what version 1 would have answered to the same "
        "requests with the same windows. The labels came days later."
    )
    return _section("What the new version gains", text, table(head, cells))


_NOTES = """
<section><h2>What is simulated</h2><ul>
<li>The payments are made up by a seed. Three to six of a hundred are frauds, far more than in life, so that a month has
enough of them.</li>
<li>A payment carries its own time. Windows go by that time: the hour before a payment is an hour of the simulation.
<code>max_late</code> of the spec allows payments that arrive months after their time.</li>
<li>Recorded requests, labels, drift and latencies go by the clock of this machine. So drift is judged every ten
seconds, which hold some days of payments here, and <code>serin labels show</code> says seconds where the bank would see
days.</li>
<li>Quality is measured with every label. Its alarm is left out of the spec: it is judged in blocks of at least a minute
of this machine's time, which would take hours.</li>
</ul></section>
"""
