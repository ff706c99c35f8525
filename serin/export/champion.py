"""Compares the candidate with the live model: both score the same newest test rows, raw, each through its own graph.

The candidate is refused when it is worse by more than `champion.max_loss` with `champion.confidence` (paired
bootstrap), overall or in a declared segment (the error probability is shared among the segments). When the two cannot
be compared it is refused too; a named person may approve either. Without a live model, or when the target has changed,
there is nothing to compare: the report says so, and the candidate passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from serin.columns.segments import segment_masks
from serin.errors import (
    BundleBroken,
    BundleUntrusted,
    ChampionRefused,
    DataError,
    ExportFailed,
    PredictionFailed,
    ServedElsewhere,
    SpecError,
)
from serin.export.gate.quality import METRICS, by_target
from serin.formats.champion import ChampionReport, Contest
from serin.formats.schema import Schema
from serin.formats.wire import Array, RawRows
from serin.metrics import HIGHER_IS_BETTER, measure, paired_bootstrap
from serin.scoring.predict import Scorer
from serin.spec.features import FeatureSpec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle
from serin.store.packages import stored_spec
from serin.store.store import Store
from serin.store.trust import find_trusted

logger = logging.getLogger(__name__)

RESAMPLES = 1000
_FEWEST_ROWS = 100
ReadRows = Callable[[tuple[FeatureSpec, ...], int], RawRows]
"""(features, most rows) -> the newest rows of the test split, with every request column that these features need."""


def meet_champion(
    spec: PipelineSpec,
    candidate: Callable[[pa.Table], dict[str, Array]],
    schema: Schema,
    *,
    store: Store,
    read_rows: ReadRows | None,
    approved_by: str | None = None,
) -> ChampionReport:
    """Returns the report of a candidate that may be published; raises ChampionRefused for one that may not."""
    live = store.aliases(spec.name).get("live")
    if live is None:
        return ChampionReport(verdict="not compared", reason="there is no live model")
    try:
        with _needed("the live model cannot be opened", BundleBroken, BundleUntrusted):
            bundle = find_trusted(store, spec.name, "live")
        report, problem = _compare(spec, candidate, schema, bundle, read_rows)
    except _Incomparable as error:
        report = ChampionReport(verdict="not compared", reason=str(error), live_version=live)
        problem = str(error)
    compared = report.overall is not None
    return settle_contest(spec.name, live, report, problem, approved_by, compared=compared)


def settle_contest(
    model: str,
    live: int,
    report: ChampionReport,
    problem: str | None,
    approved_by: str | None,
    *,
    compared: bool,
) -> ChampionReport:
    """Returns the report of a candidate without a problem, or of one that a person approves nevertheless; raises
    ChampionRefused."""
    if problem is None:
        logger.info(f"champion: {report.reason}")
        return report
    if approved_by is None:
        raise ChampionRefused(model=model, live=live, reason=problem, compared=compared)
    logger.info(f"champion: {problem}; approved by {approved_by}")
    return replace(report, verdict="approved", reason=problem, approved_by=approved_by)


class _Incomparable(Exception):
    """The reason why no comparison was possible. Never leaves this module."""


@contextmanager
def _needed(otherwise: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns errors of what a comparison needs into _Incomparable."""
    try:
        yield
    except errors as error:
        raise _Incomparable(f"{otherwise}: {error}") from error


def _compare(
    spec: PipelineSpec,
    candidate: Callable[[pa.Table], dict[str, Array]],
    schema: Schema,
    live: Bundle,
    read_rows: ReadRows | None,
) -> tuple[ChampionReport, str | None]:
    """Returns the report, and the evidence against the candidate."""
    unreadable = (BundleBroken, ExportFailed, PredictionFailed, ServedElsewhere, SpecError, OSError)
    with _needed("the live model cannot be opened", *unreadable):
        scorer = Scorer(live.path, digest=live.digest)
        before = stored_spec(Path(live.path))
    changed = _changed_target(spec, schema, before, scorer.schema)
    if changed:
        report = ChampionReport(verdict="not compared", reason=changed, live_version=live.version)
        return report, None
    if read_rows is None:
        raise _Incomparable("no raw test rows are available")
    with _needed("the tables no longer have the live model's columns", DataError, SpecError):
        rows = read_rows((*spec.features, *before.features), spec.champion.max_rows)
    if len(rows) < _FEWEST_ROWS:
        raise _Incomparable(f"the test split has {len(rows)} rows; at least {_FEWEST_ROWS} are needed")
    logger.info(f"champion: {len(rows):,} test rows through the candidate and version {live.version}")
    with _needed("the live model cannot score these rows", DataError, PredictionFailed):
        ours, theirs = candidate(rows.table), scorer.answers(rows.table)
    return _report(spec, schema, live.version, rows, ours, theirs)


def _changed_target(spec: PipelineSpec, schema: Schema, before: PipelineSpec, old: Schema) -> str:
    now, then = spec.data.target, before.data.target
    if (now.expression, now.task) != (then.expression, then.task):
        return f"the target changed from {then.expression!r} ({then.task}) to {now.expression!r} ({now.task})"
    if schema.classes != old.classes:
        return f"the classes changed from {old.classes} to {schema.classes}"
    return ""


def _report(
    spec: PipelineSpec,
    schema: Schema,
    live: int,
    rows: RawRows,
    ours: Mapping[str, Array],
    theirs: Mapping[str, Array],
) -> tuple[ChampionReport, str | None]:
    asked = spec.champion
    metric = asked.metric or METRICS[schema.task][0]
    name = schema.outputs[-1].name
    both = zip(*(by_target(schema, rows.target, scores[name]) for scores in (ours, theirs)), strict=True)
    parts = {key: (target, first, second) for (key, target, first), (_, _, second) in both}
    sure = 1 - (1 - asked.confidence) / len(parts)
    contests = {key: _contest(metric, *part, asked.max_loss, sure) for key, part in parts.items()}
    overall = max(contests.values(), key=lambda contest: contest.at_least)  # with several targets, the worst
    segments = {f"target {key}": contest for key, contest in contests.items() if key}
    masks = segment_masks(rows.table, spec.export.segments)
    shared = 1 - (1 - asked.confidence) / max(len(masks) * len(parts), 1)
    for segment, mask in masks.items():
        for key, (target, first, second) in parts.items():
            label = f"{segment}, target {key}" if key else segment
            try:
                segments[label] = _contest(
                    metric, target[mask], first[mask], second[mask], asked.max_loss, shared
                )
            except _Incomparable:
                continue  # a segment with one class has no AUC
    worse = [f"overall {_told(metric, overall)}"] if overall.worse else []
    worse += [
        f"{segment}: {_told(metric, contest)}" for segment, contest in segments.items() if contest.worse
    ]
    report = ChampionReport(
        verdict="better or equal",
        reason=f"{_told(metric, overall)} on {overall.rows:,} rows",
        live_version=live,
        metric=metric,
        max_loss=asked.max_loss,
        confidence=asked.confidence,
        overall=overall,
        segments=segments,
    )
    allowed = f"; champion.max_loss allows {asked.max_loss:g}"
    return report, "; ".join(worse) + allowed if worse else None


def _contest(
    metric: Any, target: Array, ours: Array, theirs: Array, max_loss: float, confidence: float
) -> Contest:
    try:
        mine, other = (measure(metric, target, scores) for scores in (ours, theirs))
        differences = paired_bootstrap(metric, target, ours, theirs, resamples=RESAMPLES)
    except ValueError as error:
        raise _Incomparable(f"{metric} cannot be measured: {error}") from error
    sign = -1.0 if metric in HIGHER_IS_BETTER else 1.0
    share = other if metric == "rmse" and other else 1.0
    losses = sign * differences / share
    at_least, at_most = (float(np.quantile(losses, q)) for q in (1 - confidence, confidence))
    return Contest(
        rows=len(target),
        candidate=mine,
        live=other,
        loss=sign * (mine - other) / share,
        at_least=at_least,
        at_most=at_most,
        worse=at_least > max_loss,
    )


def _told(metric: str, contest: Contest) -> str:
    """Both values, and the difference with its bounds; equal when nobody would see one."""
    values = f"{metric} {contest.candidate:.4f} against {contest.live:.4f}"
    loss, *bounds = (round(found, 4) + 0.0 for found in (contest.loss, contest.at_least, contest.at_most))
    if not any((loss, *bounds)):
        return f"{values}, equal"
    low, high = sorted(-bound + 0.0 for bound in bounds) if loss < 0 else bounds
    form = ".2%" if metric == "rmse" else ".4f"  # an rmse's loss is a share
    by = f"{abs(loss):{form}} (between {low:{form}} and {high:{form}})"
    return f"{values}, {'better' if loss < 0 else 'worse'} by {by}"
