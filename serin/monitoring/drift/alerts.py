"""Alerts about drift: what an alarm says to people, and how urgent it is. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from serin.formats.drift import DriftStatistics
from serin.formats.importance import Importance
from serin.formats.reason import utc
from serin.monitoring.alerts.alert import Alert, Severity
from serin.monitoring.drift.detector import Alarm, BinShift

_MATTERS: Final = 0.05  # of the importance of all columns together


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
    text = f"Since {utc(alarm.since)}: {_shift(first)}"
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


def _shift(shift: BinShift) -> str:
    return (
        f"the share of {shift.label} is {_percent(shift.now)}, {_percent(shift.then)} in training "
        f"(tolerance {_percent(shift.tolerance)})"
    )


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
