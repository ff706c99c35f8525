"""The alert about a version whose answers are worse than its quality objective allows."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from serin.monitoring.alerts.alert import Alert
from serin.monitoring.quality.view import Objective


def quality_alert(
    model: str, release: str, objective: Objective, recent: float | None, *, rollback: str
) -> Alert:
    """`recent`: the mean loss since the excess began. `rollback`: what is done about it; empty: nothing."""
    since = objective.since or 0.0
    began = datetime.fromtimestamp(since, UTC)
    mean = objective.mean if recent is None else recent
    found = "" if mean is None else f" is {mean:.4g} since {began:%Y-%m-%d %H:%M} UTC,"
    text = (
        f"the mean {objective.loss_name} of {release}{found} at most {objective.limit:.4g} is allowed "
        f"({objective.offline:.4g} on the test rows); {objective.used:,} labels were used"
    )
    return Alert(
        key=alert_key(model),
        kind="quality",
        model=model,
        release=release,
        severity="page",
        title=f"{release} is worse than its quality objective allows",
        text=f"{text}; {rollback}" if rollback else text,
        since=since,
        facts={**asdict(objective), "mean_since": recent, "rollback": rollback},
    )


def alert_key(model: str) -> str:
    return f"{model}/quality"
