"""What the watcher knows: alerts, and a model's recorded requests, its drift and its live quality."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from serin.console.views.models import model_tab
from serin.console.views.view import Parameters, meter
from serin.formats.captures import captures_folder, hour_began, hours_captured, parts_of_hour
from serin.formats.gate import Measured
from serin.monitoring.alerts.alert import AlertRecord, Silence
from serin.monitoring.alerts.book import read_alerts
from serin.monitoring.capture.counters import CapturesView, read_captures
from serin.monitoring.capture.read import newest
from serin.monitoring.drift.read import read_drift
from serin.monitoring.quality.view import Estimated, Objective, ReleaseQuality, read_quality
from serin.reports.charts import Axes, Drawing, Scale, number
from serin.reports.drift_page import ColumnView, column_drawing
from serin.spec.roles import Access
from serin.watcher.cluster_state import watch_home

_HOURS = 72
_MOST_RESOLVED, _LOOKED_THROUGH = 30, 1000
_MOST_SEGMENTS = 40
_MOST_REQUESTS, _NEWEST_ROWS = 10, 2000


def read_alert_list(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del parameters
    found = read_alerts(watch_home(home, "alerts"), resolved=_LOOKED_THROUGH)
    open_ones, resolved = (
        tuple(each for each in records if access.sees(each.alert.model))
        for records in (found.open, found.resolved)
    )
    silences = tuple(each for each in found.silences if access.sees_all or _is_about(each, open_ones, access))
    return {"alerts": replace(found, open=open_ones, resolved=resolved[:_MOST_RESOLVED], silences=silences)}


def _is_about(silence: Silence, records: Sequence[AlertRecord], access: Access) -> bool:
    """Returns whether a silence is about something that somebody may view. A pattern may name other models."""
    if silence.model is not None:
        return access.sees(silence.model)
    return any(silence.covers(each.alert.key, each.alert.model, now=0.0) for each in records)


def read_recorded(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del access
    model = parameters["model"]
    found = read_captures(home, model)
    drawn = found.requests + found.dropped if found else 0
    return {
        **model_tab(home, model, "captures"),
        "captures": found,
        "newest": _newest_requests(home, model) if found else [],
        "dropped_share": found.dropped / drawn if found and drawn else None,
        "chart": _recorded_rows(home, found) if found and found.versions else None,
    }


def _newest_requests(home: Path, model: str) -> list[dict[str, Any]]:
    """Returns the requests that this host recorded last, the newest first."""
    columns = ["_id", "_t", "_release", "_status", "_row"]
    found: dict[str, dict[str, Any]] = {}
    for row in reversed(newest(home, model, _NEWEST_ROWS, columns=columns).to_pylist()):
        facts = {"t": row["_t"].timestamp(), "release": row["_release"], "status": row["_status"], "rows": 0}
        found.setdefault(row["_id"], {"id": row["_id"], **facts})["rows"] += 1
    return list(found.values())[:_MOST_REQUESTS]


def _recorded_rows(home: Path, found: CapturesView) -> str:
    """Draws the recorded rows of each of the last hours with records."""
    rows: Counter[float] = Counter()
    for kept in found.versions:
        folder = captures_folder(home, found.model) / str(kept.version)
        for hour in hours_captured(home, found.model, kept.version)[-_HOURS:]:
            rows[hour_began(hour)] += sum(part.rows for part in parts_of_hour(folder / hour))
    last = max(rows)
    first = max(min(rows), last - (_HOURS - 1) * 3600)
    drawing = Drawing(920, 190, font=11)
    end = last + 3600
    axes = Axes(drawing, Scale(first, end, 64, 900), Scale(0.0, max(rows.values()), 156, 14))
    axes.rows(axes.y.ticks(4), number)
    hours = round((end - first) / 3600)
    step = next(each for each in (1, 2, 3, 6, 12, 24) if hours / each <= 12 or each == 24)
    ticks = [first + 3600 * place for place in range(0, hours + 1, step)]
    axes.columns(ticks, lambda t: f"{t % 86400 // 3600:02.0f}:00", lines=False)
    for t, count in rows.items():
        if t >= first:
            axes.bar((t, t + 3600), (0.0, count), "blue", gap=2)
    drawing.text(482, 186, "hour (UTC)", anchor="middle")
    return drawing.embedded(f"Recorded rows by hour: {sum(rows.values())} in {hours} hours")


def read_drift_watch(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del access
    model = parameters["model"]
    found = read_drift(watch_home(home, "watch/drift"), model)
    columns = found.columns if found else ()
    return {
        **model_tab(home, model, "drift"),
        "drift": found,
        "charts": {each.name: _distributions(each) for each in columns},
        "meters": {each.name: _evidence(each) for each in columns},
    }


def _distributions(column: ColumnView) -> str:
    title = f"{column.name}, training and live rows of the last day"
    if (worst := column.largest) is not None:
        title += f". Most different: {worst.label}, {worst.then:.1%} in training, {worst.now:.1%} now"
    return column_drawing(column).embedded(title)


def _evidence(column: ColumnView) -> str:
    share = min(max(column.evidence, 0.0), 1.0)
    return meter(share, "alarm" if share >= 1 else "line", "of the evidence that an alarm needs")


def read_live_quality(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del access
    model = parameters["model"]
    found = read_quality(watch_home(home, f"watch/quality/{model}.json"), model)
    releases = found.releases if found else ()
    names = _metric_names(releases)
    return {
        **model_tab(home, model, "quality"),
        "quality": found,
        "names": names,
        "charts": {each.release: _metric_charts(each, names) for each in releases},
        "days": {each.release: _days(each) for each in releases},
        "calibration": {each.release: _calibration(each) for each in releases},
        "objectives": {each.release: _objective(each.objective) for each in releases if each.objective},
        "segments": {each.release: each.segments[:_MOST_SEGMENTS] for each in releases},
    }


def _metric_names(releases: Sequence[ReleaseQuality]) -> list[str]:
    """Returns the metrics of all releases in one order, that of the newest release's test rows."""
    found = [
        name
        for release in reversed(releases)
        for name in (*release.offline, *release.metrics, *release.estimate)
    ]
    return list(dict.fromkeys(found))


def _metric_charts(release: ReleaseQuality, names: Sequence[str]) -> dict[str, str]:
    """Draws for each metric the live value, the offline one and the estimate on one scale."""
    return {
        name: _whiskers(
            name, release.metrics.get(name), release.offline.get(name), release.estimate.get(name)
        )
        for name in names
        if name in release.metrics or name in release.estimate
    }


def _whiskers(name: str, live: Measured | None, offline: Measured | None, estimate: Estimated | None) -> str:
    guess = None
    if estimate is not None:
        guess = Measured(value=estimate.value, low=estimate.value, high=estimate.value)
    rows = [("live", "blue", live), ("offline", "grey", offline), ("estimate", "orange", guess)]
    shown = [(label, colour, each) for label, colour, each in rows if each is not None]
    low, high = min(each.low for _, _, each in shown), max(each.high for _, _, each in shown)
    room = max((high - low) * 0.1, 0.002 * max(abs(low), abs(high)), 1e-9)
    drawing = Drawing(460, 26 + 24 * len(shown), font=12)
    x = Scale(low - room, high + room, 80, 380)
    axes = Axes(drawing, x, Scale(0.0, 1.0, 24.0 * len(shown), 0.0))
    axes.columns(x.ticks(4), lambda value: f"{value:.4g}")
    for index, (label, colour, each) in enumerate(shown):
        middle = 12 + 24 * index
        drawing.text(72, middle + 4, label, colour="ink", anchor="end")
        if each.high > each.low:
            drawing.rect(x(each.low), middle - 4, x(each.high) - x(each.low), 8, colour, opacity=0.35)
        drawing.dot(x(each.value), middle, colour, radius=5, ring=label == "estimate")
        drawing.text(390, middle + 4, f"{each.value:.4f}", colour="ink")
    words = ", ".join(f"{label} {each.value:.4f}" for label, _, each in shown)
    return drawing.embedded(f"{name}: {words}")


def _days(release: ReleaseQuality) -> str | None:
    """Draws the mean loss of each day, and the share of its rows that have a label."""
    days = [day for day in release.days if day.loss is not None]
    if len(days) < 2:
        return None
    losses = [float(day.loss) for day in days if day.loss is not None]
    limit = release.objective.limit if release.objective else None
    top = max([*losses, *([limit] if limit is not None else [])]) * 1.1 or 1.0
    drawing = Drawing(920, 220, font=11)
    axes = Axes(drawing, Scale(0.0, max(len(days) - 1, 1), 64, 880), Scale(0.0, top, 180, 14))
    axes.rows(axes.y.ticks(4), number)
    step = max(len(days) // 8, 1)
    axes.columns(range(0, len(days), step), lambda place: days[int(place)].day[5:], lines=False)
    if limit is not None:
        place = axes.limit(limit, "alarm")
        drawing.text(876, place - 5, "limit of the objective", colour="alarm", anchor="end", halo=True)
    axes.line([(float(index), loss) for index, loss in enumerate(losses)], "blue", width=2)
    for index, (day, loss) in enumerate(zip(days, losses, strict=True)):
        hint = f"{day.day}: {loss:.4g}, {day.labelled} of {day.recorded} rows labelled"
        axes.dot(float(index), loss, "blue", radius=3, title=hint)
    drawing.text(470, 214, "day (UTC)", anchor="middle")
    return drawing.embedded(f"{release.loss_name} by day, from {losses[0]:.4g} to {losses[-1]:.4g}")


def _calibration(release: ReleaseQuality) -> str | None:
    """Draws how often the event happened for each mean score."""
    if len(release.reliability) < 2:
        return None
    drawing = Drawing(300, 300, font=11)
    axes = Axes(drawing, Scale(0.0, 1.0, 46, 290), Scale(0.0, 1.0, 260, 12))
    axes.rows((0.0, 0.5, 1.0), lambda value: f"{value:g}")
    axes.columns((0.0, 0.5, 1.0), lambda value: f"{value:g}")
    axes.line([(0.0, 0.0), (1.0, 1.0)], "dim", width=1, dashes="4 4")
    axes.line([(score, rate) for score, rate, _ in release.reliability], "blue", width=1.8)
    most = max(rows for _, _, rows in release.reliability)
    for score, rate, rows in release.reliability:
        hint = f"score {score:.3f}, happened {rate:.1%} of {rows} rows"
        axes.dot(score, rate, "blue", radius=2 + 4 * math.sqrt(rows / most), title=hint)
    drawing.text(168, 294, "mean score", anchor="middle")
    return drawing.embedded("Calibration: share of events by mean score")


def _objective(objective: Objective) -> str:
    """Draws how far the evidence against the objective is, on a logarithmic scale."""
    share = math.log(max(objective.evidence, 1.0)) / math.log(max(objective.threshold, 2.0))
    share = 1.0 if objective.alarm else min(max(share, 0.0), 1.0)
    return meter(share, "alarm", "of the way to an alarm")
