"""Reads rows to be scored from CSV files that are written like the table that a model was trained on."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
from pydantic import TypeAdapter

from serin.errors import RowsUnfit
from serin.formats.csv_cells import CellRules
from serin.formats.csv_format import PLAIN, CsvFormat, csv_format
from serin.formats.csv_values import parse_options
from serin.formats.schema import InputColumn, Schema
from serin.spec.tables import TableSource
from serin.spec.yaml_file import read_mapping

_SPEC = "spec.yaml"
_BLOCK_BYTES = 8 * 2**20
_TYPES = {"string": pa.string(), "float": pa.float64(), "int": pa.int64(), "bool": pa.bool_(),
          "timestamp": pa.timestamp("us")}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCsv:
    """How the main table of a model was written. `rename`: name in the file -> name in requests."""

    form: CsvFormat
    rename: Mapping[str, str]

    def names_in(self, path: Path) -> list[str]:
        """The columns of a file that is written like this; none when it cannot be."""
        try:
            with path.open(encoding=self.form.text_encoding, newline="") as text:
                first = next(filter(None, csv.reader(text, **self._dialect(path))), [])
        except (UnicodeDecodeError, csv.Error):
            return []
        if self.form.names:
            return list(self.form.names) if len(first) == len(self.form.names) else []
        return first if self.form.header else [f"column_{place}" for place in range(1, len(first) + 1)]

    def _dialect(self, path: Path) -> dict[str, Any]:
        quoting = {"quotechar": self.form.quote} if self.form.quote else {"quoting": csv.QUOTE_NONE}
        return {"delimiter": self.form.delimiter_of(str(path)), **quoting}


def training_csv(bundle: Path) -> TrainingCsv | None:
    """How the main table of a bundle was written; None when neither options nor other names say so.

    Nothing else of the spec is validated: your own operators need not be installed where rows are scored."""
    if not (bundle / _SPEC).exists():
        return None
    data = read_mapping(bundle / _SPEC).get("data") or {}
    main = next(iter(data.get("tables") or ()), None)
    if main is None:
        return None
    form = csv_format(TypeAdapter(TableSource).validate_python(data["tables"][main]))
    rename = (data.get("rename") or {}).get(main) or {}
    return TrainingCsv(form=form or PLAIN, rename=rename) if form is not None or rename else None


@lru_cache(maxsize=8)
def names_in_training(bundle: Path) -> Mapping[str, str]:
    """Name in the main table -> name in requests, where they differ."""
    training = training_csv(bundle)
    return {} if training is None else training.rename


def as_requested(table: pa.Table, schema: Schema, rename: Mapping[str, str]) -> pa.Table:
    """The rows under the names that the model asks for, where they have those of the table that it was trained on."""
    asked, present = {column.name for column in schema.inputs}, set(table.column_names)
    names = {
        old: new for old, new in rename.items() if old in present and new in asked and new not in present
    }
    return table.rename_columns([names.get(name, name) for name in table.column_names]) if names else table


def read_like_training(path: Path, schema: Schema, training: TrainingCsv) -> Iterator[pa.Table] | None:
    """The file's rows, a piece at a time; None when it is not written like the training table."""
    names = training.names_in(path)
    known = {training.rename.get(name, name) for name in names}
    if not {column.name for column in schema.inputs} <= known:
        return None
    return _read(path, schema, training, names)


def _read(path: Path, schema: Schema, training: TrainingCsv, names: list[str]) -> Iterator[pa.Table]:
    form = training.form
    inputs = {column.name: column for column in schema.inputs}
    read = pacsv.ReadOptions(
        block_size=_BLOCK_BYTES,
        encoding=form.encoding,
        column_names=names,
        skip_rows_after_names=int(form.header),
    )
    parse = parse_options(form.delimiter_of(str(path)), form.quote)
    convert = pacsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    with pacsv.open_csv(path, read, parse, convert) as reader:
        for batch in reader:
            columns = {}
            for stored, cells in zip(names, batch.columns, strict=True):
                name = training.rename.get(stored, stored)
                known = inputs.get(name)
                columns[name] = (
                    cells if known is None else _converted(cells, known, CellRules.of(form, stored))
                )
            yield pa.table(columns)


def _converted(cells: pa.Array, column: InputColumn, rules: CellRules) -> pa.Array:
    kind = _TYPES[column.kind]
    if column.kind == "timestamp" and not rules.date_formats:
        kind = pa.string()  # the wire conversion reads more forms of times
        cells = rules.without_nulls(cells)
    try:
        return rules.converted(cells, kind)
    except pa.ArrowException as error:
        raise RowsUnfit(
            column=column.name, reason=f"holds a cell that is not {column.kind}: {error}"
        ) from error
