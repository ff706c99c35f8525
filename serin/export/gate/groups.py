"""The version by group: metric and selection rate for each value of the columns in `export.segments`.

A group is compared with all other test rows. A version is refused when a group is worse by more than a limit of
`export.groups` and that is sure at the confidence, which is shared among the groups. Bands are normal approximations:
DeLong's variance for AUC, the variance of the mean for losses and rates. Groups below `min_rows` rows are named and not
judged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from statistics import NormalDist

import numpy as np
import pyarrow as pa

from serin.columns.segments import group_masks
from serin.errors import GateFailed
from serin.export.gate.quality import HIGHER_IS_BETTER, METRICS
from serin.formats.gate import GroupReport, GroupResult, Measured
from serin.formats.schema import Schema
from serin.formats.wire import Array
from serin.metrics import estimate, estimate_share
from serin.spec.export import ExportSpec, GroupsSpec, Metric

logger = logging.getLogger(__name__)


def check_groups(
    export: ExportSpec, schema: Schema, table: pa.Table, target: Array, given: Mapping[str, Array]
) -> GroupReport:
    """Every group of the rows in `table`, which have this target and these answers. GateFailed when one is surely
    worse than a limit allows."""
    asked: GroupsSpec = export.groups
    metric: Metric = asked.metric or METRICS[schema.task][0]
    masks = group_masks(table, export.segments)
    judged = {name: mask for name, mask in masks.items() if np.count_nonzero(mask) >= asked.min_rows}
    parts = list(_by_target(schema, target, given[schema.outputs[-1].name]))
    limits = (asked.max_gap is not None) + (asked.max_rate_gap is not None)
    sure = 1 - (1 - asked.confidence) / max(1, len(judged) * len(parts) * limits)
    judge = _Judge(asked, metric, schema.task == "binary", NormalDist().inv_cdf(sure))
    found = [
        judge.compare(f"{name}, target {key}" if key else name, mask, truth, scores)
        for name, mask in judged.items()
        for key, truth, scores in parts
    ]
    report = GroupReport(
        columns=export.segments,
        metric=metric,
        rows=len(target),
        confidence=asked.confidence,
        threshold=asked.threshold if schema.task == "binary" else None,
        min_rows=asked.min_rows,
        max_gap=asked.max_gap,
        max_rate_gap=asked.max_rate_gap,
        groups=tuple(found),
        small={name: int(np.count_nonzero(mask)) for name, mask in masks.items() if name not in judged},
    )
    logger.info(f"groups: {len(judged)} of {', '.join(export.segments)}, {len(report.small)} too small")
    if worse := [f"{one.group}: {one.worse}" for one in report.groups if one.worse]:
        raise GateFailed(
            stage="groups",
            what=f"{len(worse)} of {len(found)} groups beyond a limit, on {len(target):,} test rows",
            found="; ".join(worse),
        )
    return report


def _by_target(schema: Schema, target: Array, scores: Array) -> Iterator[tuple[str, Array, Array]]:
    """Truth and answers by the target's name; a single one has none."""
    if not schema.targets:
        yield "", target, scores[:, 0] if scores.shape[1] == 1 else scores
        return
    for at, name in enumerate(schema.targets):
        yield name, target[:, at], scores[:, at]


class _Judge:
    """Compares a group with the other rows. `sure`: standard errors by which a gap must be beyond its limit."""

    def __init__(self, asked: GroupsSpec, metric: Metric, has_rate: bool, sure: float) -> None:
        self._asked, self._metric, self._has_rate, self._sure = asked, metric, has_rate, sure
        self._shown = NormalDist().inv_cdf((1 + asked.confidence) / 2)

    def compare(self, group: str, mask: Array, target: Array, scores: Array) -> GroupResult:
        metric, gap, worse = self._quality(target[mask], scores[mask], target[~mask], scores[~mask])
        rate, rate_gap, apart = (
            self._rate(scores[mask], scores[~mask]) if self._has_rate else (None, None, "")
        )
        return GroupResult(
            group=group,
            rows=int(np.count_nonzero(mask)),
            metric=metric,
            gap=gap,
            rate=rate,
            rate_gap=rate_gap,
            worse=" and ".join(filter(None, (worse, apart))),
        )

    def _quality(
        self, target: Array, scores: Array, other_target: Array, other_scores: Array
    ) -> tuple[Measured | None, Measured | None, str]:
        try:
            own, own_error = estimate(self._metric, target, scores)
        except ValueError:
            return None, None, ""  # one class has no AUC
        shown = self._band(own, own_error)
        try:
            other, other_error = estimate(self._metric, other_target, other_scores)
        except ValueError:
            return shown, None, ""
        sign = -1.0 if self._metric in HIGHER_IS_BETTER else 1.0
        unit = other if self._metric == "rmse" and other else 1.0
        size, error = sign * (own - other) / unit, math.hypot(own_error, other_error) / unit
        sure, limit = size - self._sure * error, self._asked.max_gap
        worse = ""
        if limit is not None and sure > limit:
            worse = (
                f"{self._metric} {own:.4f}, other rows {other:.4f}: worse by {size:.4f}, surely by more than "
                f"{sure:.4f} (allowed {limit:g})"
            )
        return shown, self._band(size, error), worse

    def _rate(self, scores: Array, others: Array) -> tuple[Measured | None, Measured | None, str]:
        own, own_error = estimate_share(scores >= self._asked.threshold)
        shown = self._band(own, own_error, 0.0, 1.0)
        if not len(others):
            return shown, None, ""
        other, other_error = estimate_share(others >= self._asked.threshold)
        size, error = own - other, math.hypot(own_error, other_error)
        sure, limit = abs(size) - self._sure * error, self._asked.max_rate_gap
        apart = ""
        if limit is not None and sure > limit:
            apart = (
                f"selection rate {own:.4f}, other rows {other:.4f}: {abs(size):.4f} apart, surely more than "
                f"{sure:.4f} (allowed {limit:g})"
            )
        return shown, self._band(size, error), apart

    def _band(
        self, value: float, error: float, least: float = -math.inf, most: float = math.inf
    ) -> Measured | None:
        if not math.isfinite(error):
            return None
        low, high = value - self._shown * error, value + self._shown * error
        return Measured(value=value, low=max(low, least), high=min(high, most))
