"""Joins with tables that are larger than the memory for them: hash-partitioned by key, joined one part at a time.

A row and its partner have the same key and so the same part. The result does not depend on the number of parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.columns.column import Column, take
from serin.errors import TableTooLarge
from serin.etl.binding.layout import JoinLayout, Layout
from serin.etl.engines.engine import Engine, Held
from serin.etl.engines.memory_budget import partner_bytes
from serin.etl.engines.pieces import cut_pieces
from serin.etl.engines.spill import Spilled, spill
from serin.etl.relational.groups import joined as join_columns
from serin.etl.relational.groups import key_hashes
from serin.etl.relational.relation import LoadedJoin, Related, join_tables, load_join, relate_columns
from serin.etl.sources.files import find_files
from serin.etl.sources.tables import Piece, Read, Table, open_table, read_piece
from serin.formats.nulls import null_of
from serin.formats.schema import Kind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedJoin:
    """A table partitioned by the hash of its keys, one file per partition; None for a partition without rows."""

    layout: JoinLayout
    parts: tuple[Table | None, ...]


Join = LoadedJoin | PartitionedJoin


def partition_join(
    join: JoinLayout, table: Table, *, lookup: bool, budget_bytes: int, scratch: Path
) -> PartitionedJoin:
    """Partitions a table so that each part fits into `budget_bytes`; TableTooLarge when the join needs it whole."""
    needed = partner_bytes(join, table)
    advice = None
    if lookup:
        advice = "a lookup travels inside the model, whole: name fewer columns, or use source: request"
    elif not join.keys:
        advice = (
            "a join by time alone cannot be partitioned: give the join a key (`on`), or name fewer columns"
        )
    if advice is not None:
        raise TableTooLarge(table=table.name, needed=needed, room=budget_bytes, advice=advice)
    parts = _partition(join, table, -(-needed // max(budget_bytes, 1)), scratch)
    logger.info(f"{table.name} is joined in {len(parts)} partitions, because it does not fit into memory")
    return PartitionedJoin(layout=join, parts=parts)


def _partition(join: JoinLayout, table: Table, count: int, scratch: Path) -> tuple[Table | None, ...]:
    folder = scratch / f"{table.name}-by-key-{count}"
    if not folder.exists():
        folder.mkdir()
        rows = max(1, table.rows // (2 * count))
        schema = pa.schema([(read.name_in_file, _type(read)) for read in join.reads])
        with ExitStack() as stack:
            writers = [
                stack.enter_context(pq.ParquetWriter(folder / f"{part}.parquet", schema, compression="lz4"))
                for part in range(count)
            ]
            for piece in cut_pieces(table, join.reads, rows, scratch):
                _write_parts(read_piece(piece, join.reads), join, schema, writers)
    return tuple(_open_part(table.name, folder / f"{part}.parquet", folder) for part in range(count))


def _write_parts(
    columns: Mapping[str, Column], join: JoinLayout, schema: pa.Schema, writers: Sequence[pq.ParquetWriter]
) -> None:
    part_of = key_hashes([columns[key.column] for key in join.keys]) % len(writers)
    for part, writer in enumerate(writers):
        own = take(columns, part_of == part)
        arrays = [own[read.column].to_arrow().cast(_type(read)) for read in join.reads]
        if len(arrays[0]):
            writer.write_table(pa.table(arrays, schema))


def _open_part(name: str, path: Path, scratch: Path) -> Table | None:
    return open_table(name, find_files(name, str(path)), scratch) if pq.read_metadata(path).num_rows else None


def _type(read: Read) -> pa.DataType:
    if read.kind == "float":
        return pa.float64() if read.exact else pa.float32()
    kinds: dict[Kind, pa.DataType] = {
        "int": pa.int64(), "bool": pa.bool_(), "string": pa.string(), "timestamp": pa.timestamp("us", "UTC"),
    }  # fmt: skip
    return kinds[read.kind]


def hold_related(
    engine: Engine, pieces: Sequence[Piece], layout: Layout, joins: Sequence[Join], scratch: Path
) -> Held:
    """The result of `relate` for each piece; the joins are done one after the other, part by part."""
    held = engine.hold(read_rows, pieces, layout)
    for join in joins:
        if isinstance(join, LoadedJoin):
            held = engine.then(join_whole, held, join)
            continue
        found: dict[int, list[Spilled]] = {}
        for number, table in enumerate(join.parts):
            if table is not None:
                shared = (load_join(join.layout, table), number, len(join.parts), str(scratch))
                for first_row, part in engine.collect(find_partners, held, *shared):
                    found.setdefault(first_row, []).append(part)
        held = engine.then(put_partners, held, join.layout, found, layout.kinds)
        for part in (part for parts in found.values() for part in parts):
            part.remove()
    return engine.then(relate_joined, held, layout)


def read_rows(piece: Piece, layout: Layout) -> Related:
    rows = np.arange(piece.first_row, piece.first_row + piece.rows, dtype=np.int64)
    return Related(columns=read_piece(piece, layout.reads), rows=rows, dropped={"no_partner": 0})


def join_whole(related: Related, join: LoadedJoin) -> Related:
    columns, rows = join_tables(related.columns, related.rows, [join])
    return _fewer(related, columns, rows)


def find_partners(
    related: Related, join: LoadedJoin, number: int, count: int, scratch: str
) -> tuple[int, Spilled]:
    """The places of the rows that have a partner in this part, and its columns, in a file; named by the first row."""
    spec = join.layout.spec
    used = {key: related.columns[key] for key in (*spec.here, *([spec.as_of.column] if spec.as_of else []))}
    places = np.flatnonzero(key_hashes([used[key] for key in spec.here]) % count == number)
    inner = replace(join, layout=replace(join.layout, spec=spec.model_copy(update={"how": "inner"})))
    joined, places = join_tables(take(used, places), places, [inner])
    found = {name: joined[name] for name in join.columns}
    columns = {
        name: Column(kind=own.kind, values=own.values, dictionary=own.dictionary).with_few_texts()
        for name, own in found.items()
    }
    first_row = int(related.rows[0]) if len(related.rows) else -1
    return first_row, spill((places, columns), scratch)


def put_partners(
    related: Related, join: JoinLayout, found: Mapping[int, Sequence[Spilled]], kinds: Mapping[str, Kind]
) -> Related:
    """The rows with what all parts found for them."""
    parts = [part.load() for part in found[int(related.rows[0]) if len(related.rows) else -1]]
    places = np.concatenate([own for own, _ in parts])
    columns = dict(related.columns)
    for name in join.columns.values():
        values = join_columns([own[name] for _, own in parts])
        all_rows = np.full(len(related.rows), null_of(kinds[name]), values.values.dtype)
        all_rows[places] = values.values
        columns[name] = Column(kind=values.kind, values=all_rows, dictionary=values.dictionary)
    if join.spec.how == "left":
        return replace(related, columns=columns)
    keep = np.zeros(len(related.rows), bool)
    keep[places] = True
    return _fewer(related, take(columns, keep), related.rows[keep])


def relate_joined(related: Related, layout: Layout) -> Related:
    """Derived columns and the filter, after the joins."""
    done = relate_columns(related.columns, related.rows, layout, [])
    return replace(done, dropped={**done.dropped, "no_partner": related.dropped["no_partner"]})


def _fewer(related: Related, columns: Mapping[str, Column], rows: Any) -> Related:
    lost = related.dropped["no_partner"] + len(related.rows) - len(rows)
    return Related(columns=columns, rows=rows, dropped={"no_partner": lost})
