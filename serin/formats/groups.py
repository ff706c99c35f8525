"""`groups` of gate.json: the metric and the selection rate of each group of test rows, with bands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A number with its band at the report's confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """One group against all other rows. `metric` is None where it cannot be measured (AUC with one class), `rate` in
    anything but a binary task. `gap`: how much worse the metric is than that of the other rows (an rmse's as a share of
    theirs); `rate_gap`: the group's selection rate minus theirs. `worse`: what is surely beyond a limit."""

    group: str
    rows: int
    metric: Measured | None
    gap: Measured | None
    rate: Measured | None
    rate_gap: Measured | None
    worse: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """`rows`: test rows in all. `small`: groups with fewer than `min_rows` rows, which are not judged. The error
    probability of the limits is shared among the groups."""

    columns: tuple[str, ...]
    metric: str
    rows: int
    confidence: float
    threshold: float | None
    min_rows: int
    max_gap: float | None
    max_rate_gap: float | None
    groups: tuple[GroupResult, ...]
    small: Mapping[str, int] = field(default_factory=dict)
