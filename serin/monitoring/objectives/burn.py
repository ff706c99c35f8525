"""Error budgets and how fast they burn. Pure.

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
from typing import Final, Literal, NamedTuple

PERIOD_S: Final = 30 * 86_400
QUIET_S: Final = 600.0  # an alert ends when no pair has fired for this long

_LEAST_BAD_LONG: Final = 10
_LEAST_BAD_SHORT: Final = 3
_ROUNDING: Final = 1 - 1e-9

Name = Literal["availability", "latency"]
Severity = Literal["page", "ticket"]
SEVERITIES: Final[tuple[Severity, ...]] = ("page", "ticket")


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
