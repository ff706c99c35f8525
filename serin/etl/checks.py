"""The spec's checks: counted per piece, merged, and judged once over all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serin.errors import CheckFailed, SpecError
from serin.features.column import Column
from serin.spec.data import CheckSpec


@dataclass(frozen=True, slots=True)
class CheckCounts:
    """What a check found. `examples`: (row, value) of the first rows that break it."""

    rows: int
    nulls: int
    outside: int
    examples: tuple[tuple[int, str], ...]


def count_checks(
    columns: Mapping[str, Column], rows: npt.NDArray[np.int64], checks: Sequence[CheckSpec]
) -> tuple[CheckCounts, ...]:
    return tuple(_count(columns[check.column], rows, check) for check in checks)


def judge_checks(checks: Sequence[CheckSpec], parts: Sequence[Sequence[CheckCounts]]) -> None:
    """CheckFailed for the first check that does not hold over all pieces."""
    for index, check in enumerate(checks):
        found = [part[index] for part in parts]
        total, nulls = sum(each.rows for each in found), sum(each.nulls for each in found)
        outside = sum(each.outside for each in found)
        if outside:
            examples = sorted(example for each in found for example in each.examples)[:3]
            raise CheckFailed(
                column=check.column,
                rule=_rule(check),
                found=f"{outside:,} of {total:,} rows",
                examples=[f"{value} in row {row}" for row, value in examples],
            )
        if check.max_nulls is not None and total and nulls / total > check.max_nulls:
            raise CheckFailed(
                column=check.column,
                rule=f"max_nulls: {check.max_nulls:g}",
                found=f"{nulls:,} of {total:,} rows are null ({nulls / total:.4g})",
            )


def _count(column: Column, rows: npt.NDArray[np.int64], check: CheckSpec) -> CheckCounts:
    null = column.null
    outside = np.zeros(len(column), bool)
    if check.min is not None or check.max is not None:
        if column.kind in ("string", "timestamp"):
            problem = f"column {check.column!r} is a {column.kind}; min and max need a number"
            raise SpecError(where="data", problems=[("data.checks", problem)])
        values = column.values
        if check.min is not None:
            outside |= values < _bound(values, check.min)
        if check.max is not None:
            outside |= values > _bound(values, check.max)
        outside &= ~null
    first = np.flatnonzero(outside)[:3]
    examples = tuple((int(rows[place]), f"{column.values[place]:g}") for place in first)
    return CheckCounts(len(column), int(null.sum()), int(outside.sum()), examples)


def _bound(values: npt.NDArray[np.generic], bound: float) -> float | np.float32:
    """As precise as the column: 0.1 in a float32 column is not above 0.1."""
    return np.float32(bound) if values.dtype == np.float32 else bound


def _rule(check: CheckSpec) -> str:
    bounds = {"min": check.min, "max": check.max}
    return ", ".join(f"{name}: {bound:g}" for name, bound in bounds.items() if bound is not None)
