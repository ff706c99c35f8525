"""Totals over all rows after the relational work: how many are left, why others were dropped, and the results of
checks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serin.errors import TableEmpty
from serin.etl.engines.device import gpu_aware
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.checks import CheckCounts, judge_checks, newest_times
from serin.etl.relational.relation import Prepared, Unknown
from serin.etl.relational.target import Class, merge_classes
from serin.spec.data import DataSpec

logger = logging.getLogger(__name__)
_WORDS = {
    "no_partner": "without a partner",
    "filtered": "that data.where leaves out",
    "duplicate": "that repeat another by data.unique",
    "null_target": "without a target",
    "null_time": "without a time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    rows: int
    dropped: dict[str, int]
    classes: tuple[Class, ...]
    labels: int  # different targets; 0 for a regression
    unknown: Sequence[Mapping[str, Unknown]]  # by piece
    newest: dict[str, int]  # of the columns whose freshness is checked
    warnings: Sequence[str]  # of checks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Summary:
    rows: int
    checks: tuple[CheckCounts, ...]
    dropped: Mapping[str, int]
    classes: tuple[Class, ...]
    unknown: Mapping[str, Unknown]


def total_up(data: DataSpec, engine: Engine, held: Held) -> Totals:
    """Judges the checks on rows; TableEmpty when no row is left."""
    summaries: list[_Summary] = engine.collect(summarise, held)
    checks = [each.checks for each in summaries]
    warnings = judge_checks(data.checks, checks)
    rows = sum(each.rows for each in summaries)
    dropped = added([each.dropped for each in summaries])
    refuse_empty(data, rows, dropped)
    if any(dropped.values()):
        logger.info(f"dropped {_listed(dropped)}; {rows:,} rows left")
    classes: tuple[Class, ...] = ()
    if data.target.task == "multiclass":
        classes = merge_classes(data.target, [each.classes for each in summaries])
    return Totals(
        rows=rows,
        dropped=dropped,
        classes=classes,
        labels={"binary": 2, "multiclass": len(classes), "regression": 0}[data.target.task],
        unknown=[each.unknown for each in summaries],
        newest=newest_times(data.checks, checks),
        warnings=warnings,
    )


@gpu_aware
def summarise(prepared: Prepared) -> _Summary:
    return _Summary(
        rows=len(prepared.rows),
        checks=prepared.checks,
        dropped=prepared.dropped,
        classes=prepared.target.classes or (),
        unknown=prepared.unknown,
    )


def refuse_empty(data: DataSpec, rows: int, dropped: Mapping[str, int]) -> None:
    """TableEmpty when no row is left."""
    if rows == 0:
        raise TableEmpty(table=data.main, why=f"none is left after joins and drops ({_listed(dropped)})")


def added(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """How many rows all pieces dropped, by reason."""
    total: dict[str, int] = {}
    for part in parts:
        for reason, count in part.items():
            total[reason] = total.get(reason, 0) + count
    return total


def _listed(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} rows {_WORDS[reason]}" for reason, count in dropped.items() if count)
