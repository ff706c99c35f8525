"""What the drift watch of a model says to people: alerts, and all of it for pages, the command, the console and
Prometheus, read from its state."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from serin.errors import NotFound
from serin.formats.drift import BinnedColumn, DriftStatistics
from serin.formats.drift import read_drift as read_statistics
from serin.formats.importance import Importance, read_importance
from serin.formats.reason import utc
from serin.formats.schema import read_schema
from serin.monitoring.alerts.alert import Alert, Severity
from serin.monitoring.drift.detector import Alarm, BinShift
from serin.monitoring.drift.model_watch import ReleaseWatch, read_state, resume
from serin.reports.drift_page import AlarmView, BinView, ColumnView, DriftView, State
from serin.store.artifacts import Release
from serin.store.store import Store

_MATTERS: Final = 0.05  # of the importance of all columns together


def _bundle(model: str, version: int, known: str) -> Path:
    """The bundle's folder. What the watcher of another host knows has the folder there."""
    if Path(known).is_dir():
        return Path(known)
    try:
        return Path(Store.open().bundle(model, version).path)
    except NotFound:
        return Path(known)


def read_drift(home: Path, model: str) -> DriftView | None:
    """The watch of the model's live release; None when it is not watched, or nothing was counted yet. Changes
    nothing."""
    state = read_state(home, model)
    if state is None or state.live is None or (stored := state.releases.get(state.live)) is None:
        return None
    bundle = _bundle(model, state.live, stored.bundle)
    if not bundle.is_dir() or (statistics := read_statistics(bundle)) is None:
        return None  # deleted
    inputs = tuple(column.name for column in read_schema(bundle).inputs)
    watch = resume(home, model, statistics, inputs, stored)
    release = Release(model=model, version=state.live, edition=state.live_edition).name
    importance = read_importance(bundle)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """How much a column matters to the model. `rank`: 1 is the most important; None: not measured, as for scores.
    `share`: its part of the importance of all columns."""

    rank: int | None
    share: float | None

    @property
    def severity(self) -> Severity:
        return "info" if self.share is not None and self.share < _MATTERS else "ticket"


def priority_of(column: str, importance: Importance | None) -> Priority:
    """The priority of a request column; that of a score is not measured and never low."""
    losses = {} if importance is None else {each.column: max(each.loss, 0.0) for each in importance.columns}
    if column not in losses:
        return Priority(rank=None, share=None)
    rank = 1 + sum(loss > losses[column] for loss in losses.values())
    total = sum(losses.values())
    return Priority(rank=rank, share=losses[column] / total if total > 0 else None)


def alert_key(model: str, column: str) -> str:
    return f"{model}/drift/{column}"


def drift_alert(
    model: str, release: str, alarm: Alarm, statistics: DriftStatistics, importance: Importance | None
) -> Alert:
    """The alert of an open alarm. Its text names the values then and now, the tolerance and the segments."""
    priority = priority_of(alarm.column, importance)
    first, *others = alarm.bins
    text = (
        f"Since {utc(alarm.since)}: the share of {first.label} is {_percent(first.now)}, {_percent(first.then)} in "
        f"training (tolerance {_percent(first.tolerance)})"
    )
    if others:
        text += "; also " + ", ".join(map(_short, others))
    if alarm.examples:
        text += f". Values that training never had, for example: {', '.join(map(repr, alarm.examples))}"
    text += f". Seen after {alarm.rows:,} rows, at {utc(alarm.at)}."
    if alarm.segments:
        text += f" Only where {' or '.join(alarm.segments)}."
    if priority.rank is not None and importance is not None:
        text += f" Importance: number {priority.rank} of {len(importance.columns)} columns."
    text += (
        f" To look: `serin drift {model}`, `serin captures show {model}`. To retrain on newer rows: `serin run SPEC`. "
        f"To go back: `serin rollout rollback {model}`."
    )
    return Alert(
        key=alert_key(model, alarm.column),
        kind="drift",
        model=model,
        release=release,
        severity=priority.severity,
        title=title_of(alarm),
        text=text,
        since=alarm.since,
        facts=_facts(alarm, priority, statistics),
    )


def title_of(alarm: Alarm) -> str:
    """The alarm as a clause: "carrier drifted (AA from 12.3% to 0% of rows)"."""
    where = f" where {' or '.join(alarm.segments)}" if alarm.segments else ""
    what = "the scores" if alarm.source == "score" else alarm.column
    return f"{what} drifted{where} ({_short(alarm.bins[0])} of rows)"


def _short(shift: BinShift) -> str:
    return f"{shift.label} from {_percent(shift.then)} to {_percent(shift.now)}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%" if share >= 0.0005 or share == 0 else "<0.05%"


def _facts(alarm: Alarm, priority: Priority, statistics: DriftStatistics) -> dict[str, Any]:
    return {
        "column": alarm.column,
        "source": alarm.source,
        "segments": list(alarm.segments),
        "bins": [asdict(shift) for shift in alarm.bins],
        "size": alarm.size,
        "rows": alarm.rows,
        "examples": list(alarm.examples),
        "at": alarm.at,
        "importance_rank": priority.rank,
        "importance_share": priority.share,
        "false_alarms_per_year": statistics.false_alarms,
    }
