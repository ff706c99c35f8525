"""The alert of an objective whose budget burns too fast, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serin.monitoring.alerts.alert import Alert
from serin.monitoring.objectives.burn import Name, Objective, Pair, Severity, Share


def alert_key(model: str, name: Name, severity: Severity) -> str:
    """A page and a ticket are two alerts: the page ends with the incident, the ticket when the windows of days have
    forgotten it."""
    return f"{model}/objective/{name}{'' if severity == 'page' else '/slow-burn'}"


def objective_alert(
    objective: Objective,
    pair: Pair,
    windows: Mapping[int, Share],
    *,
    model: str,
    release: str,
    since: float,
    left: float | None,
    more: str = "",
) -> Alert:
    """`left`: the share of the budget that is left; `more`: a sentence about a rollback."""
    short, long = windows[pair.short_s], windows[pair.long_s]
    what = "fail" if objective.name == "availability" else f"take longer than {objective.limit_ms:g} ms"
    shares = (
        f"{short.bad_share:.2%} of {short.requests} requests in the last {duration(pair.short_s)} and "
        f"{long.bad_share:.2%} of {long.requests} in the last {duration(pair.long_s)} {what}; "
        f"{objective.budget:.2%} are allowed."
    )
    rates = (
        f"The error budget burns at {objective.burn(short):.1f} and {objective.burn(long):.1f} times the rate "
        f"that it can bear for 30 days (limit {pair.threshold:g})."
    )
    sentences = [shares, rates]
    if left is not None:
        state = (
            f"{left:.0%} of the budget of 30 days is left" if left > 0 else "The budget of 30 days is used up"
        )
        sentences.append(f"{state}.")
    if more:
        sentences.append(f"{more[0].upper()}{more[1:]}.")
    return Alert(
        key=alert_key(model, objective.name, pair.severity),
        kind="objective",
        model=model,
        release=release,
        severity=pair.severity,
        title=_title(model, objective, pair),
        text=" ".join(sentences),
        since=since,
        facts=_facts(objective, pair, windows, left),
    )


def _title(model: str, objective: Objective, pair: Pair) -> str:
    what = "fail" if objective.name == "availability" else "are slow"
    return f"{model}: too many requests {what}{'' if pair.severity == 'page' else ' over days'}"


def duration(seconds: int) -> str:
    if seconds >= 86_400:
        return f"{seconds // 86_400} days"
    return f"{seconds // 3_600} h" if seconds >= 3_600 else f"{seconds // 60} min"


def _facts(
    objective: Objective, pair: Pair, windows: Mapping[int, Share], left: float | None
) -> dict[str, Any]:
    return {
        "objective": objective.name,
        "target": objective.target,
        "limit_ms": objective.limit_ms,
        "threshold": pair.threshold,
        "budget_left": left,
        "windows": [
            {
                "seconds": window,
                "requests": windows[window].requests,
                "bad": windows[window].bad,
                "burn": objective.burn(windows[window]),
            }
            for window in (pair.short_s, pair.long_s)
        ],
    }
