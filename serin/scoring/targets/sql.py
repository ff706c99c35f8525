"""A table of a database as the target of scheduled scoring: each run is one transaction, with its watermark.

Watermarks are in the table `serin_scored_runs` beside it. Its primary key lets one of two runs of the same number
through, wherever they run. Rows are copied by ADBC, a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from serin.errors import DatabaseFailed, ScoringRefused
from serin.formats.rows import flat
from serin.scoring.targets.target import (
    ScoredRun,
    batches_of,
    check_committed,
    check_complete,
    read_watermark,
    run_name,
)
from serin.spec.scores import ResultTable
from serin.store.databases import connected, literal, quoted

_RUNS = "serin_scored_runs"
_COLUMNS = "target TEXT NOT NULL, run INTEGER NOT NULL, watermark TEXT NOT NULL, PRIMARY KEY (target, run)"


@dataclass(slots=True)
class SqlTarget:
    table: ResultTable
    folder: Path
    _known: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        return f"{self.table.table} in {self.table.connection}"

    def read_runs(self) -> dict[int, ScoredRun]:
        try:  # as a writer: SQLite then undoes a transaction that a kill has cut short
            with connected(self.table.connection, write=True) as connection, connection.cursor() as cursor:
                there = self._exists(connection, self._short_name)
                runs = self._read(cursor) if self._exists(connection, _RUNS) else {}
        except DatabaseFailed as error:
            raise self._refusal(f"it cannot be read: {error.reason}") from error
        if there and not runs:
            raise self._refusal("it was made by someone else; name a table that does not exist yet")
        if runs and not there:
            reason = f"it is gone, and {_RUNS} has its runs; restore it, or remove them there"
            raise self._refusal(reason)
        check_complete(self, runs, max(runs, default=0))
        self._known = there
        return runs

    def commit(self, number: int, done: ScoredRun) -> None:
        rows = _flat_batches(batches_of(self.folder / run_name(number)))
        try:
            with connected(self.table.connection, write=True) as connection, connection.cursor() as cursor:
                cursor.execute(f"CREATE TABLE IF NOT EXISTS {self._sql_name(_RUNS)} ({_COLUMNS})")
                values = f"{literal(self._short_name)}, {number}, {literal(done.dump().decode())}"
                cursor.execute(f"INSERT INTO {self._sql_name(_RUNS)} VALUES ({values})")  # noqa: S608 (quoted)
                cursor.adbc_ingest(
                    self._short_name,
                    rows,
                    mode="append" if self._known else "create",
                    db_schema_name=self._schema,
                )
                connection.commit()
        except DatabaseFailed as error:
            check_committed(self, number, done, error, error.reason)

    def _read(self, cursor: Any) -> dict[int, ScoredRun]:
        table, target = self._sql_name(_RUNS), literal(self._short_name)
        cursor.execute(f"SELECT run, watermark FROM {table} WHERE target = {target} ORDER BY run")  # noqa: S608 (quoted)
        return {
            int(run): read_watermark(f"run {run} of {self.name}", watermark)
            for run, watermark in cursor.fetchall()
        }

    def _exists(self, connection: Any, table: str) -> bool:
        from adbc_driver_manager import AdbcStatusCode, ProgrammingError

        try:
            connection.adbc_get_table_schema(table, db_schema_filter=self._schema)
        except ProgrammingError as error:
            if error.status_code != AdbcStatusCode.NOT_FOUND:
                raise
            connection.rollback()  # PostgreSQL does no more in this transaction
            return False
        return True

    @property
    def _schema(self) -> str | None:
        return self.table.table.rpartition(".")[0] or None

    @property
    def _short_name(self) -> str:
        return self.table.table.rpartition(".")[2]

    def _sql_name(self, table: str) -> str:
        return quoted(table) if self._schema is None else f"{quoted(self._schema)}.{quoted(table)}"

    def _refusal(self, reason: str) -> ScoringRefused:
        return ScoringRefused(target=self.name, reason=reason)


def _flat_batches(rows: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """The rows with a column for each element of a list: databases have no lists."""

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows:
            yield from flat(pa.Table.from_batches([batch])).to_batches()

    schema = flat(rows.schema.empty_table()).schema
    return pa.RecordBatchReader.from_batches(schema, batches())
