"""Reads tables of labels: a file, a table of the spec by its name, or anything that `data.tables` can name."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pyarrow.parquet as pq

from serin.columns.column import kind_of_type
from serin.errors import LabelsUnfit
from serin.formats.csv_format import PLAIN, csv_format
from serin.formats.csv_values import convert_options, parse_options
from serin.monitoring.quality.labels import FINISHED, Columns, TruthOf
from serin.spec.tables import TableSource

_FILES = (".parquet", ".pq", ".csv", ".json", ".jsonl", ".ndjson")
_IDS = ("_id", "_client_id")
_PIECE_ROWS = 1 << 20


def read_labels(source: str, of: TruthOf, columns: Columns) -> pa.Table:
    """The table behind `source`. A name of `data.tables` means that table as it is now; other columns of it than the
    labels need are not read."""
    if source in of.data.tables:
        rename = of.data.rename.get(source, {})
        return _read_table(source, of.data.tables[source], rename, of, columns)
    path = Path(source)
    if "://" in source or "*" in source or path.is_dir():
        return _read_table("labels", source, {}, of, columns)
    if path.suffix.lower() not in _FILES:
        reason = (
            f"in {source}: use .parquet, .csv, .jsonl, or a table of the spec: {', '.join(of.data.tables)}"
        )
        raise LabelsUnfit(model=of.model, column="", reason=reason)
    try:
        return _read_file(path, of, columns)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise LabelsUnfit(model=of.model, column="", reason=f"cannot be read from {path}: {error}") from error


def _read_file(path: Path, of: TruthOf, columns: Columns) -> pa.Table:
    """Parquet, CSV or JSON lines. In CSV ids stay text, and so do text columns of the request."""
    match path.suffix.lower():
        case ".csv":
            texts = [column.name for column in of.schema.inputs if column.kind == "string"]
            texts += [*_IDS, *filter(None, (columns.id, columns.client_id))]
            with pacsv.open_csv(path, parse_options=parse_options()) as reader:
                present = set(reader.schema.names)
            types = dict.fromkeys(present.intersection(texts), pa.string())
            form = csv_format(of.data.tables.get(of.data.main)) or PLAIN
            convert = convert_options(types, null_values=form.null_values)
            return pacsv.read_csv(path, None, parse_options(), convert)
        case ".parquet" | ".pq":
            return pq.read_table(path)
        case _:
            return pajson.read_json(path)


def _read_table(
    name: str, table: TableSource, rename: dict[str, str], of: TruthOf, columns: Columns
) -> pa.Table:
    """A table as the ETL reads it: files of any number and place, a Delta table, a query."""
    from serin.etl.sources.find import find_table
    from serin.etl.sources.tables import cut, open_table, read_piece

    wanted = _wanted(of, columns)
    with tempfile.TemporaryDirectory(prefix="serin-labels-") as scratch:
        found = find_table(name, table, rows=Path(scratch) / "sql")
        opened = open_table(name, found, Path(scratch))
        kinds = {column: kind_of_type(kind) for column, kind in opened.types.items()}
        reads = [
            opened.read(column, kind)
            for column, kind in kinds.items()
            if kind is not None and rename.get(column, column) in wanted
        ]
        pieces = [read_piece(piece, reads) for piece in cut(opened, _PIECE_ROWS)]
    tables = [
        pa.table({rename.get(key, key): _plain(column.to_arrow()) for key, column in piece.items()})
        for piece in pieces
    ]
    return pa.concat_tables(tables)


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _wanted(of: TruthOf, columns: Columns) -> set[str]:
    """The columns that labels may need."""
    target = of.data.target
    named = (
        columns.id,
        columns.row,
        columns.client_id,
        columns.value,
        columns.time,
        of.data.id,
        of.data.time,
    )
    known = {*_IDS, "_row", *FINISHED, *columns.on, *target.names, *of.data.made_of(target.columns)}
    return known | {name for name in named if name is not None}
