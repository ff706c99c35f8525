"""Deletes recorded rows for which an expression is true: a person's, for example. From a home, and from the records
that hosts have uploaded, where files that hold such rows are replaced by others without.

It may be cut short at any time and is done again then, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serin.expressions import Expression, ExpressionError, Masked, evaluate, parse
from serin.formats.captures import Part, open_part
from serin.monitoring.capture.read import until_found
from serin.monitoring.capture.retention import Hours

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Forgotten = Callable[[int, pa.Table], int]
"""Deletes what else is known of these rows of a version; returns how many labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What was deleted. `labels`: how many labels were deleted with the rows. `leftovers`: files that were removed
    because a process that was killed had left them, such as an earlier deletion. `unread`: columns of the expression
    that some versions do not have; for those versions they are null."""

    rows: int = 0
    files: int = 0
    labels: int = 0
    leftovers: int = 0
    unread: tuple[str, ...] = ()

    def __add__(self, other: Deletion) -> Deletion:
        return Deletion(
            rows=self.rows + other.rows,
            files=self.files + other.files,
            labels=self.labels + other.labels,
            leftovers=self.leftovers + other.leftovers,
            unread=tuple(sorted({*self.unread, *other.unread})),
        )


def forget(
    hours: Hours,
    where: str,
    *,
    only: Collection[Any] | None = None,
    remove: bool = True,
    also: Sequence[Forgotten] = (),
) -> Deletion:
    """Deletes the rows of all versions for which `where` is true, or those in `only` some hours. Raises ExpressionError
    when it cannot be computed: nothing is deleted then. `remove`: otherwise rows are only counted. `also`: called with
    the rows that a file loses before it is rewritten, so that a repeated call finds them after a crash. No file has the
    rows once this returns, also none that readers leave out."""
    expression, known = parse(where), hours.columns()
    if known:
        check_columns(expression, known)
    found = Deletion(leftovers=hours.tidy() if remove and only is None else 0)

    def forget_in(hour: Any) -> Deletion:
        deleted = Deletion()
        with hours.opened(hour) as parts:
            for part in parts:
                going, unread = _going_rows(part, expression, known)
                deleted += Deletion(unread=unread)
                if not going.any():
                    continue
                labels = 0
                if also:
                    rows = pq.read_table(part.path).filter(pa.array(going))
                    labels = sum(act(part.version, rows) for act in also)
                deleted += Deletion(rows=int(going.sum()), files=1, labels=labels)
                if remove:
                    hours.keep(hour, part, pa.array(~going))
        return deleted

    for hour in hours.sizes() if only is None else only:
        found += until_found(partial(forget_in, hour))
    return found


def check_columns(expression: Expression, known: Collection[str]) -> None:
    """Raises ExpressionError for a column that no record has."""
    for name in expression.columns:
        if name not in known:
            columns = ", ".join(sorted(known))
            problem = f"{expression.text!r}: the records have no column {name!r}; they have {columns}"
            raise ExpressionError(problem)


def _going_rows(
    part: Part, expression: Expression, known: dict[str, pa.DataType]
) -> tuple[Flags, tuple[str, ...]]:
    """For each row of a file whether the expression is true, and the columns that the file lacks: they are null there,
    with the type of `known`, which gets those of the file."""
    with open_part(part.path) as file:
        there = {field.name: field.type for field in file.schema_arrow}
        table = file.read([name for name in dict.fromkeys(["_row", *expression.columns]) if name in there])
    known |= there
    if set(expression.columns) - known.keys():  # no value of such a column was recorded so far
        return np.zeros(table.num_rows, bool), ()
    return rows_where(expression, table.replace_schema_metadata(None), known)


def rows_where(
    expression: Expression, table: pa.Table, known: Mapping[str, pa.DataType]
) -> tuple[Flags, tuple[str, ...]]:
    """For each row whether the expression is true, and the columns that the table lacks: they are null, with the type
    of `known`."""
    missing = tuple(name for name in dict.fromkeys(expression.columns) if name not in table.column_names)
    for name in missing:
        table = table.append_column(name, pa.nulls(table.num_rows, known[name]))
    return matches(expression, table), missing


def matches(expression: Expression, table: pa.Table) -> Flags:
    """For each row whether the expression is true; null counts as false."""
    if not table.num_rows:
        return np.zeros(0, bool)
    names = ["_row", *expression.columns]  # at least one: it says how many rows there are
    result = evaluate(expression, {name: _masked(table.column(name)) for name in names})
    values = np.broadcast_to(result.values, (table.num_rows,))
    null = np.broadcast_to(result.null, (table.num_rows,))
    if values.dtype != bool:
        raise ExpressionError(f"{expression.text!r} is not a condition: write for example passenger_id == 17")
    return values & ~null


def _masked(column: pa.ChunkedArray) -> Masked:
    kind = column.type
    if pa.types.is_nested(kind):
        raise ExpressionError(f"columns of type {kind} cannot be used in a condition")
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
        kind = column.type
    null = pc.is_null(column).to_numpy().astype(bool)
    fill = pa.scalar("" if pa.types.is_string(kind) else 0).cast(kind)
    values = pc.fill_null(column, fill).to_numpy()
    return Masked(np.asarray(values), null)
