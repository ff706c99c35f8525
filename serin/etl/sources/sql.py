"""Reads the rows of a SQL query through ADBC into a Parquet file that is named by its content.

A database does not say whether a query's rows have changed: a build reads them once and everything after it uses the
file. The connection's URI is never logged, stored or shown.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serin.errors import DatabaseFailed, SourceUnreadable
from serin.formats.dataset import Snapshot, SourceFile
from serin.machine.durable import sync
from serin.spec.tables import SqlTable
from serin.store.databases import connected, is_sqlite, quoted

_GROUP_ROWS = 2**18
_TYPED_ROWS = 2**20  # that SQLite's driver infers types from; the others declare them


def query_digest(table: SqlTable) -> str:
    """Of the query and its order."""
    return hashlib.sha256("\0".join([table.sql, *table.order_by]).encode()).hexdigest()


def unread(name: str, table: SqlTable) -> SourceFile:
    """The table as it is known without asking the database: nothing tells whether its rows have changed."""
    snapshot = Snapshot(kind="sql", source=table.connection, version=query_digest(table))
    return SourceFile(table=name, path=table.connection, size=0, modified="", snapshot=snapshot)


def read_sql(name: str, table: SqlTable, folder: Path, *, most_rows: int | None = None) -> SourceFile:
    """The query's rows (at most `most_rows`) in a Parquet file in `folder`; the same rows give the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / f"half-{secrets.token_hex(8)}"
    try:
        _write(name, table, half, most_rows)
        sync(half)
        with half.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        path = half.rename(folder / f"{digest}.parquet")
    except DatabaseFailed as error:
        raise _refusal(name, table, error.reason) from None
    finally:
        half.unlink(missing_ok=True)
    content = f"sha256:{path.stem}"
    return replace(unread(name, table), path=str(path), size=path.stat().st_size, content=content)


def _write(name: str, table: SqlTable, target: Path, most_rows: int | None) -> None:
    with connected(table.connection) as connection, connection.cursor() as cursor:
        if is_sqlite(table.connection):
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_TYPED_ROWS)})
        cursor.execute(_statement(table, most_rows))
        reader = cursor.fetch_record_batch()
        missing = [column for column in table.order_by if column not in reader.schema.names]
        if missing:
            raise _refusal(name, table, f"the query has no column {missing[0]!r}, which order_by names")
        schema = pa.schema([_plain(field) for field in reader.schema])
        last: pa.Table | None = None
        with pq.ParquetWriter(target, schema, compression="lz4", write_page_checksum=True) as writer:
            for group in _groups(reader, schema):
                _refuse_ties(name, table, group if last is None else pa.concat_tables([last, group]))
                last = group.slice(max(len(group) - 1, 0))
                writer.write_table(group, row_group_size=_GROUP_ROWS)


def _statement(table: SqlTable, most_rows: int | None) -> str:
    order = ", ".join(map(quoted, table.order_by))
    limit = "" if most_rows is None else f" LIMIT {most_rows}"
    return f"SELECT * FROM (\n{table.sql}\n) AS serin_rows ORDER BY {order}{limit}"  # noqa: S608 (the user's query)


def _groups(reader: Any, schema: pa.Schema) -> Iterator[pa.Table]:
    """Groups of equal size, however the driver cuts its batches: the file's bytes depend on the rows alone."""
    held: list[pa.RecordBatch] = []
    for batch in reader:
        columns = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
        held.append(pa.RecordBatch.from_arrays(columns, schema=schema))
        while sum(map(len, held)) >= _GROUP_ROWS:
            whole = pa.Table.from_batches(held, schema)
            yield whole.slice(0, _GROUP_ROWS).combine_chunks()
            held = whole.slice(_GROUP_ROWS).to_batches()
    if held:
        yield pa.Table.from_batches(held, schema).combine_chunks()


def _plain(field: pa.Field) -> pa.Field:
    """The field with a type that Parquet and the ETL know: drivers give decimals of any size as text."""
    kind = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
    declared = (field.metadata or {}).get(b"ADBC:postgresql:typname", b"")
    return pa.field(field.name, pa.float64() if declared == b"numeric" else kind)


def _refuse_ties(name: str, table: SqlTable, rows: pa.Table) -> None:
    """SourceUnreadable when two neighbours are equal in `order_by`: their order would be a matter of chance."""
    tied = None
    for column in table.order_by:
        values = rows.column(column).combine_chunks()
        one, other = values[:-1], values[1:]
        both_null = pc.and_(pc.is_null(one), pc.is_null(other))
        same = pc.or_(pc.fill_null(pc.equal(one, other), False), both_null)
        tied = same if tied is None else pc.and_(tied, same)
    place = pc.index(tied, True).as_py()
    if place >= 0:
        key = ", ".join(f"{column} = {rows.column(column)[place].as_py()!r}" for column in table.order_by)
        reason = f"order_by does not order its rows completely: several have {key}; add a column to order_by"
        raise _refusal(name, table, reason)


def _refusal(name: str, table: SqlTable, reason: str) -> SourceUnreadable:
    return SourceUnreadable(table=name, path=table.connection, reason=reason)
