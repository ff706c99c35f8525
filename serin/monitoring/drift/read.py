"""Reads the drift watch of a model from its state, for pages, the command, the console and Prometheus."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serin.formats.drift import BinnedColumn
from serin.formats.drift import read_drift as read_statistics
from serin.formats.importance import Importance, read_importance
from serin.formats.schema import read_schema
from serin.monitoring.drift.alerts import drift_alert, priority_of
from serin.monitoring.drift.detector import Alarm
from serin.monitoring.drift.model_watch import ReleaseWatch, read_state, resume
from serin.reports.drift_page import AlarmView, BinView, ColumnView, DriftView, State
from serin.store.artifacts import Release


def read_drift(home: Path, model: str) -> DriftView | None:
    """The watch of the model's live release; None when it is not watched, or nothing was counted yet. Changes
    nothing."""
    state = read_state(home, model)
    if state is None or state.live is None or (stored := state.releases.get(state.live)) is None:
        return None
    bundle = Path(stored.bundle)
    if not bundle.is_dir() or (statistics := read_statistics(bundle)) is None:
        return None  # deleted
    inputs = tuple(column.name for column in read_schema(bundle).inputs)
    watch = resume(home, model, statistics, inputs, stored)
    release, importance = Release(model=model, version=state.live).name, read_importance(bundle)
    counted = watch.state
    alarms = tuple(_alarm(watch, release, importance, alarm) for alarm in counted.alarms.values())
    past = [_alarm(watch, release, importance, each.alarm, each.ended) for each in reversed(counted.past)]
    return DriftView(
        model=model,
        release=release,
        false_alarms=statistics.false_alarms,
        origin=statistics.origin,
        weeks=statistics.weeks,
        training_rows=statistics.total_rows,
        rows=counted.rows,
        first=counted.first,
        newest=counted.newest,
        day_since=watch.day_since,
        columns=_columns(watch, importance),
        alarms=alarms,
        past=tuple(past),
    )


def _alarm(
    watch: ReleaseWatch, release: str, importance: Importance | None, alarm: Alarm, ended: float | None = None
) -> AlarmView:
    alert = drift_alert(Release.parse(release).model, release, alarm, watch.statistics, importance)
    bins = tuple(
        BinView(label=each.label, then=each.then, now=each.now, tolerance=each.tolerance)
        for each in alarm.bins
    )
    return AlarmView(
        column=alarm.column,
        title=alert.title,
        text=alert.text,
        severity=alert.severity,
        segments=alarm.segments,
        bins=bins,
        rows=alarm.rows,
        since=alarm.since,
        at=alarm.at,
        ended=ended,
    )


def _columns(watch: ReleaseWatch, importance: Importance | None) -> tuple[ColumnView, ...]:
    series = watch.statistics.series
    evidence = [0.0] * len(watch.statistics.columns)
    for each, level in zip(series, watch.detector.levels(), strict=True):
        evidence[each.column] = max(evidence[each.column], level)
    counts = np.split(watch.day_counts(), watch.detector.first_bin[1:])
    found = [
        _column(watch, place, counts[place].astype(float), evidence[each.column], importance)
        for place, each in enumerate(series)
        if each.segment is None and not each.quick
    ]
    found.sort(key=lambda each: (each.state != "drifted", -each.evidence, each.importance_rank or 0))
    return tuple(found)


def _column(
    watch: ReleaseWatch,
    series: int,
    counts: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    evidence: float,
    importance: Importance | None,
) -> ColumnView:
    own = watch.statistics.series[series]
    column = watch.statistics.columns[own.column]
    rows = int(counts.sum())
    now = (counts / max(rows, 1)).tolist()
    bins = tuple(
        BinView(label=label, then=then, now=share, tolerance=tolerance, block=block, judged=judged)
        for label, then, share, tolerance, block, judged in zip(
            column.labels, own.share, now, own.tolerance, own.block, _judged(watch, series), strict=True
        )
    )
    state = _state(column.name in watch.state.alarms, rows, bins)
    priority = priority_of(column.name, importance)
    return ColumnView(
        name=column.name,
        source=column.source,
        kind=column.kind,
        state=state,
        evidence=1.0 if state == "drifted" else evidence,  # the detector starts again after an alarm
        importance_rank=priority.rank,
        importance_share=priority.share,
        rows=rows,
        bins=bins,
        nulls=(bins[-1].then, bins[-1].now),
        unseen=(bins[-2].then, bins[-2].now) if column.kind == "category" else None,
        outside=_outside(column, bins),
    )


def _state(alarm: bool, rows: int, bins: tuple[BinView, ...]) -> State:
    if alarm:
        return "drifted"
    if not rows:
        return "no rows"
    return "no alarm yet" if any(each.beyond > 0 for each in bins) else "no alarm"


def _judged(watch: ReleaseWatch, series: int) -> list[float | None]:
    """When the open block of each bin ends at the earliest; None before its first row."""
    detector = watch.detector
    groups = detector.group_of_bin[detector.series_of_bin == series]
    ends = detector.open_start[groups] + detector.group_length[groups]
    return [None if np.isnan(end) else float(end) for end in ends]


def _outside(column: BinnedColumn, bins: tuple[BinView, ...]) -> tuple[float, float] | None:
    if column.kind != "number":
        return None
    below, above = bins[-3:-1]
    return below.then + above.then, below.now + above.now
