"""The spec's checks on rows: counted per piece, merged, and judged once over all rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, beside, count_true, on_host
from serin.errors import CheckFailed
from serin.etl.relational.groups import group_codes, joined
from serin.formats.schema import Kind
from serin.spec.checks import CheckSpec
from serin.spec.section import shortest

logger = logging.getLogger(__name__)
Rows = npt.NDArray[np.int64]
FRESHNESS = "freshness.json"
_EXAMPLES = 3
_US = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class CheckCounts:
    """What a check found. `examples`: (row, value) of the first rows that break it. `values`: to find equal ones."""

    rows: int
    kind: Kind | None = None
    nulls: int = 0
    outside: int = 0
    examples: tuple[tuple[int, str], ...] = ()
    newest: int | None = None
    values: tuple[Column, Rows] | None = None


def count_checks(
    columns: Mapping[str, Column], rows: Rows, checks: Sequence[CheckSpec]
) -> tuple[CheckCounts, ...]:
    return tuple(
        CheckCounts(len(rows)) if check.column is None else _count(columns[check.column], rows, check)
        for check in checks
    )


def judge_checks(checks: Sequence[CheckSpec], parts: Sequence[Sequence[CheckCounts]]) -> list[str]:
    """Says every check that does not hold over all pieces; CheckFailed for the first of those that must hold."""
    return settle(
        [
            (check, failure)
            for index, check in enumerate(checks)
            for failure in failures_of(check, [part[index] for part in parts])
        ]
    )


def settle(failures: Sequence[tuple[CheckSpec, CheckFailed]]) -> list[str]:
    """Logs and returns the warnings. Raises the first failure that is not a warning, after logging the others."""
    fatal = [failure for check, failure in failures if check.otherwise == "fail"]
    for check, failure in failures:
        if check.otherwise == "warn":
            logger.warning(f"warning: {failure}")
        elif failure is not fatal[0]:
            logger.warning(f"also: {failure}")
    if fatal:
        raise fatal[0]
    return [str(failure) for _, failure in failures]


def failures_of(check: CheckSpec, found: Sequence[CheckCounts]) -> list[CheckFailed]:
    """Where a check does not hold over all pieces."""
    total = sum(each.rows for each in found)
    if check.column is None:
        return _table_failures(check, total)
    failures = []

    def fail(rule: str, text: str, examples: Sequence[str] = ()) -> None:
        failures.append(CheckFailed(column=check.column or "", rule=rule, found=text, examples=examples))

    if check.type is not None and found[0].kind != check.type:
        fail(f"type: {check.type}", f"it is a {found[0].kind}")
    outside = sum(each.outside for each in found)
    if outside:
        examples = sorted(example for each in found for example in each.examples)[:_EXAMPLES]
        fail(
            _rule(check),
            f"{outside:,} of {total:,} rows",
            [f"{value} in row {row}" for row, value in examples],
        )
    nulls = sum(each.nulls for each in found)
    if check.max_nulls is not None and total and nulls / total > check.max_nulls:
        share = f"{nulls:,} of {total:,} rows are null ({nulls / total:.4g})"
        void = sorted(row for each in found for row, value in each.examples if value == "null")
        fail(f"max_nulls: {check.max_nulls:g}", share, [f"row {row}" for row in void[:_EXAMPLES]])
    if check.unique:
        repeated, examples_of = _repeated([each.values for each in found if each.values is not None])
        if repeated:
            fail("unique: true", f"{repeated:,} rows repeat an earlier one", examples_of)
    if check.newest_within is not None:
        stale = too_old(check, max((each.newest for each in found if each.newest is not None), default=None))
        failures += [stale] if stale else []
    return failures


def too_old(check: CheckSpec, newest: int | None) -> CheckFailed | None:
    """Freshness depends on the clock, so it is asked again when a dataset is found instead of computed."""
    assert check.newest_within is not None
    assert check.column is not None
    now = datetime.now(UTC).timestamp() * _US
    if newest is not None and now - newest <= check.newest_within * _US:
        return None
    found = "it holds no time"
    if newest is not None:
        moment = datetime.fromtimestamp(newest / _US, UTC).isoformat(timespec="seconds")
        found = f"the newest is {moment}, {(now - newest) / _US / 86400:.1f} days ago"
    return CheckFailed(
        column=check.column, rule=f"newest_within: {shortest(check.newest_within)}", found=found
    )


def write_freshness(folder: Path, newest: Mapping[str, int]) -> None:
    """Keeps the newest moments beside the dataset, when any check asks for them."""
    if newest:
        (folder / FRESHNESS).write_text(json.dumps(newest) + "\n", encoding="utf-8")


def judge_freshness(checks: Sequence[CheckSpec], folder: Path) -> None:
    """Runs the freshness checks of an existing dataset."""
    asked = [check for check in checks if check.newest_within is not None]
    if not asked:
        return
    file = folder / FRESHNESS
    newest = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = [(check, too_old(check, newest.get(check.column))) for check in asked]
    settle([(check, failure) for check, failure in found if failure is not None])


def newest_times(checks: Sequence[CheckSpec], parts: Sequence[Sequence[CheckCounts]]) -> dict[str, int]:
    """Returns the newest time of every column with a freshness check."""
    newest: dict[str, int] = {}
    for index, check in enumerate(checks):
        times = [part[index].newest for part in parts]
        known = [time for time in times if time is not None]
        if check.newest_within is not None and check.column is not None and known:
            newest[check.column] = max(known)
    return newest


def _table_failures(check: CheckSpec, total: int) -> list[CheckFailed]:
    failures = []
    for rule, bound, broken in (
        ("min_rows", check.min_rows, check.min_rows is not None and total < check.min_rows),
        ("max_rows", check.max_rows, check.max_rows is not None and total > check.max_rows),
    ):
        if broken:
            failures.append(
                CheckFailed(column=None, rule=f"{rule}: {bound:,}", found=f"there are {total:,} rows")
            )
    return failures


def _count(column: Column, rows: Rows, check: CheckSpec) -> CheckCounts:
    null = column.null
    outside = np.zeros_like(null)
    if check.min is not None or check.max is not None:
        outside |= _out_of_range(column, check) & ~null
    if check.values is not None:
        outside |= ~_among(column, check) & ~null
    shown = _first(outside)
    examples = [(int(rows[place]), shown_value(column, place)) for place in shown]
    if check.max_nulls is not None and not shown:
        examples += [(int(rows[place]), "null") for place in _first(null)]
    newest = None
    if check.newest_within is not None:
        newest = int(column.values.max()) if count_true(null) < len(null) else None
    return CheckCounts(
        rows=len(column),
        kind=column.kind,
        nulls=count_true(null),
        outside=count_true(outside),
        examples=tuple(examples),
        newest=newest,
        values=(column[~null].on_host(), on_host(rows[beside(~null, rows)])) if check.unique else None,
    )


def _first(chosen: npt.NDArray[np.bool_]) -> list[int]:
    """The places of the first rows that are chosen."""
    places: list[int] = on_host(np.flatnonzero(chosen)[:_EXAMPLES]).tolist()
    return places


def _out_of_range(column: Column, check: CheckSpec) -> npt.NDArray[np.bool_]:
    values, outside = column.values, np.zeros_like(column.null)
    if check.min is not None:
        outside |= values < _bound(values, check.min)
    if check.max is not None:
        outside |= values > _bound(values, check.max)
    return outside


def _among(column: Column, check: CheckSpec) -> npt.NDArray[np.bool_]:
    assert check.values is not None
    if column.dictionary is not None:
        allowed = pa.array([str(value) for value in check.values], pa.string())
        entries = np.asarray(pc.is_in(column.dictionary, value_set=allowed).to_numpy(zero_copy_only=False))
        return beside(np.append(entries, True), column.values)[column.values]  # type: ignore[no-any-return]
    return np.isin(column.values, beside(np.asarray(check.values, np.int64), column.values))


def _repeated(parts: Sequence[tuple[Column, Rows]]) -> tuple[int, list[str]]:
    column, rows = joined([own for own, _ in parts]), np.concatenate([rows for _, rows in parts])
    codes = group_codes(
        [
            Column(kind="int", values=column.values.view(np.int32).astype(np.int64))
            if column.kind == "float"
            else column
        ]
    )
    order = np.lexsort((rows, codes))
    again = order[1:][codes[order][1:] == codes[order][:-1]]
    first = again[np.argsort(rows[again])][:_EXAMPLES]
    return len(again), [f"{shown_value(column, int(place))} again in row {rows[place]}" for place in first]


def shown_value(column: Column, place: int) -> str:
    """A value of a column as messages show it."""
    value = column[place : place + 1].on_host().to_arrow().to_pylist()[0]
    return repr(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _bound(values: npt.NDArray[np.generic], bound: float) -> float | np.float32:
    """As precise as the column: 0.1 in a float32 column is not above 0.1."""
    return np.float32(bound) if values.dtype == np.float32 else bound


def _rule(check: CheckSpec) -> str:
    bounds = {"min": check.min, "max": check.max}
    rules = [f"{name}: {bound:g}" for name, bound in bounds.items() if bound is not None]
    return ", ".join([*rules, *([f"values: {list(check.values)}"] if check.values is not None else [])])
