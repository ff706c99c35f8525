"""Checks that compare this dataset with the one before it: rows, nulls, and how far a distribution has moved."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serin.errors import CheckFailed
from serin.etl.relational.checks import settle
from serin.formats.dataset import STATISTICS
from serin.formats.statistics import CategoryStatistics, ColumnStatistics, NumberStatistics, read_statistics
from serin.machine.documents import canonical
from serin.spec.checks import CheckSpec
from serin.spec.data import DataSpec
from serin.store.artifacts import Dataset
from serin.store.store import Store

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]


def family_key(pipeline: str, data: DataSpec) -> str:
    """Returns the same key for consecutive datasets: same pipeline, same tables by name, same target."""
    target = data.target.model_dump(mode="json", exclude={"known_at_serving"})
    document = {"family": list(data.tables), "pipeline": pipeline, "target": target}
    return hashlib.sha256(canonical(document)).hexdigest()


def find_previous(store: Store, pipeline: str, data: DataSpec) -> Dataset | None:
    """The dataset to compare with; not looked for when no check compares."""
    if not any(check.compares for check in data.checks):
        return None
    return store.find_dataset(family_key(pipeline, data))


def judge_against(
    previous: Dataset | None,
    checks: Sequence[CheckSpec],
    rows: Mapping[str, int],
    statistics: Mapping[str, ColumnStatistics],
) -> list[str]:
    """The warnings of comparing checks that do not hold; CheckFailed for one that must. None without a previous one."""
    asked = [check for check in checks if check.compares]
    if not asked:
        return []
    if previous is None:
        logger.info("no earlier dataset to compare with; comparing checks are skipped")
        return []
    before = read_statistics(Path(previous.path) / STATISTICS)
    failures = []
    for check in asked:
        if check.column is None:
            found = _rows_changed(check, sum(previous.rows.values()), sum(rows.values()))
        else:
            found = _column_changed(check, before.get(check.column), statistics.get(check.column))
        failures += [(check, failure) for failure in found]
    return settle(failures)


def _rows_changed(check: CheckSpec, before: int, now: int) -> list[CheckFailed]:
    assert check.max_row_change is not None
    change = (now - before) / max(before, 1)
    if abs(change) <= check.max_row_change:
        return []
    found = f"{now:,} rows now, {before:,} in the dataset before ({change:+.1%})"
    return [CheckFailed(column=None, rule=f"max_row_change: {check.max_row_change:g}", found=found)]


def _column_changed(
    check: CheckSpec, before: ColumnStatistics | None, now: ColumnStatistics | None
) -> list[CheckFailed]:
    assert check.column is not None
    if before is None or now is None or not before.rows or not now.rows:
        return []
    failures = []
    nulls = now.nulls / now.rows, before.nulls / before.rows
    if check.max_null_change is not None and abs(nulls[0] - nulls[1]) > check.max_null_change:
        found = f"{nulls[0]:.2%} null now, {nulls[1]:.2%} in the dataset before"
        rule = f"max_null_change: {check.max_null_change:g}"
        failures.append(CheckFailed(column=check.column, rule=rule, found=found))
    moved = distance(before, now)
    if check.max_shift is not None and moved is not None and moved > check.max_shift:
        found = f"{moved:.1%} of the rows are distributed differently than in the dataset before"
        failures.append(CheckFailed(column=check.column, rule=f"max_shift: {check.max_shift:g}", found=found))
    return failures


def distance(before: ColumnStatistics, now: ColumnStatistics) -> float | None:
    """Numbers: the largest gap between the two cumulative shares. Categories: the share that would have to change."""
    if isinstance(before, NumberStatistics) and isinstance(now, NumberStatistics):
        places = np.unique([*before.edges, *now.edges])
        return float(np.abs(_cumulative(before, places) - _cumulative(now, places)).max())
    if isinstance(before, CategoryStatistics) and isinstance(now, CategoryStatistics):
        shares = [
            {
                value: count / max(each.rows - each.nulls, 1)
                for value, count in zip(each.values, each.counts, strict=True)
            }
            for each in (before, now)
        ]
        named = {value for each in shares for value in each}
        moved = sum(abs(shares[0].get(value, 0.0) - shares[1].get(value, 0.0)) for value in named)
        others = [1 - sum(each.values()) for each in shares]
        return float(moved + abs(others[0] - others[1])) / 2
    return None


def _cumulative(statistics: NumberStatistics, places: Floats) -> Floats:
    ends = np.concatenate([[0], np.cumsum(statistics.counts)])
    return np.asarray(np.interp(places, statistics.edges, ends / max(int(ends[-1]), 1)))
