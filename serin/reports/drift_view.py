"""What the drift page, the command and the console show about a model: plain data, filled by monitoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
