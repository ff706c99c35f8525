"""Error budgets, how fast they burn, and the alert that says so. Pure.

An objective allows a share of bad requests, its budget. The burn rate of a window is its share of bad requests divided
by the budget: at 1 the budget lasts exactly its 30 days. An alert needs both windows of a pair: the long one says that
the burn matters, the short one that it still lasts. So a page means that 2% of the budget burned in an hour, or 5% in
six hours; a ticket that a tenth burned in three days.

Little traffic: a pair also needs at least 10 bad requests in the long window and 3 in the short one. One failure among
three requests at night fires nothing; an outage at a request per minute fires after ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from serin.monitoring.alerts.alert import Alert

PERIOD_S: Final = 30 * 86_400
QUIET_S: Final = 600.0  # an alert ends when no pair has fired for this long

_LEAST_BAD_LONG: Final = 10
_LEAST_BAD_SHORT: Final = 3
_ROUNDING: Final = 1 - 1e-9

Name = Literal["availability", "latency"]
Severity = Literal["page", "ticket"]
SEVERITIES: Final[tuple[Severity, ...]] = ("page", "ticket")
FIRST_S: Final = 3_600.0  # after its promotion; a burn that begins later has another cause
BEFORE_S: Final = 21_600.0  # of the previous version's traffic are looked at
_LEAST_BEFORE: Final = 30  # requests of the previous version; with fewer nothing is known


class Share(NamedTuple):
    """How many of some requests were bad."""

    requests: int = 0
    bad: int = 0

    @property
    def bad_share(self) -> float:
        return self.bad / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    short_s: int
    long_s: int
    threshold: float
    severity: Severity


PAIRS: Final = (
    Pair(short_s=300, long_s=3_600, threshold=14.4, severity="page"),
    Pair(short_s=1_800, long_s=21_600, threshold=6.0, severity="page"),
    Pair(short_s=21_600, long_s=259_200, threshold=1.0, severity="ticket"),
)
WINDOWS: Final = tuple(sorted({window for pair in PAIRS for window in (pair.short_s, pair.long_s)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """`target`: the share of requests that must be good. `limit_ms`: of latency only."""

    name: Name
    target: float
    limit_ms: float | None = None

    @property
    def budget(self) -> float:
        return 1.0 - self.target

    def burn(self, share: Share) -> float:
        return share.bad_share / self.budget


def burn_rates(
    objective: Objective, windows: Mapping[int, Share], age_s: float | None = None
) -> dict[int, float]:
    """Returns the burn rate of each window, by its length in seconds.

    `age_s`: for how long requests have been counted. A window that is longer is taken to begin with good requests:
    otherwise the first ten failures of a new model would be the failures of three days. None: all windows are full.
    """
    return {
        window: objective.burn(share) * (1.0 if age_s is None else min(1.0, age_s / window))
        for window, share in windows.items()
    }


def firing_pair(
    objective: Objective,
    windows: Mapping[int, Share],
    age_s: float | None = None,
    *,
    severity: Severity | None = None,
) -> Pair | None:
    """Returns the most urgent pair, of one severity if named, of which both windows burn too fast. For the other
    arguments see `burn_rates`."""
    rates = burn_rates(objective, windows, age_s)
    for pair in PAIRS:
        short, long = windows[pair.short_s], windows[pair.long_s]
        enough = long.bad >= _LEAST_BAD_LONG and short.bad >= _LEAST_BAD_SHORT
        burns = min(rates[pair.short_s], rates[pair.long_s]) >= pair.threshold * _ROUNDING
        if enough and burns and severity in (None, pair.severity):
            return pair
    return None


def budget_left(objective: Objective, period: Share, age_s: float | None = None) -> float | None:
    """Returns the share of the budget of 30 days that is left, negative when it is overspent; None without requests.
    `age_s`: see `burn_rates`; so budget and burn rates of a new model agree."""
    if not period.requests:
        return None
    return 1.0 - burn_rates(objective, {PERIOD_S: period}, age_s)[PERIOD_S]


def burning_since(
    objective: Objective, rows: Sequence[tuple[float, Share]], threshold: float
) -> float | None:
    """Returns when a burn began: the time from which to the end the most requests were bad beyond the threshold.

    `rows`: times and shares, oldest first. None: never.
    """
    best, began, excess = 0.0, None, 0.0
    for t, share in reversed(rows):
        excess += share.bad - threshold * objective.budget * share.requests
        if excess > best:
            best, began = excess, t
    return began


def add(shares: Iterable[Share]) -> Share:
    listed = list(shares)
    return Share(sum(each.requests for each in listed), sum(each.bad for each in listed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one version's clients saw from `t` on. `version`: with the edition of its lookups."""

    t: float
    version: str
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`why`: a sentence for the journal and the alert."""

    guilty: bool
    why: str


def blame(
    objective: Objective, rows: Sequence[Row], *, live: str, previous: str, promoted: float, now: float
) -> Verdict:
    """Compares the live version since its first request with the previous one before and beside it.

    `rows`: oldest first. The release is to blame when its own requests burn the budget too fast, the burn began before
    it was promoted or in the hour after, and the previous version kept the promise in its last six hours.
    """

    def innocent(why: str) -> Verdict:
        return Verdict(guilty=False, why=why)

    ours = [row for row in rows if row.version == live]
    recent = {window: add(row.share for row in ours if row.t >= now - window) for window in WINDOWS}
    pair = firing_pair(objective, recent)
    if pair is None or pair.severity != "page":
        return innocent(f"version {live} alone does not burn the budget too fast")
    since = burning_since(objective, [(row.t, row.share) for row in ours], pair.threshold)
    if since is None or since > promoted + FIRST_S:
        return innocent(f"the burn began more than an hour after the release of version {live}")
    before = add(row.share for row in rows if row.version == previous and row.t > since - BEFORE_S)
    if before.requests < _LEAST_BEFORE:
        return innocent(f"version {previous} had only {before.requests} requests to compare with")
    if objective.burn(before) >= 1.0:
        bad = f"{before.bad_share:.2%} of its requests were bad"
        return innocent(f"version {previous} broke the promise too: {bad}")
    what = "fail" if objective.name == "availability" else "are slow"
    return Verdict(
        guilty=True,
        why=f"since the release of version {live} too many requests {what} "
        f"({recent[pair.long_s].bad_share:.2%}; version {previous}: {before.bad_share:.2%})",
    )


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
