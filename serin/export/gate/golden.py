"""The dataset's golden rows for the gate and, with the model's answers, for the bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import ExportFailed
from serin.formats.bundle import GOLDEN, output_column
from serin.formats.schema import Schema
from serin.formats.wire import Array, to_wire


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRows:
    """Rows in wire form with the features that the ETL computed for them."""

    table: pa.Table
    inputs: dict[str, Array]
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    num: Array  # float32[rows, k]
    cat: Array  # int32[rows, m]
    row: Array

    def __len__(self) -> int:
        return len(self.row)

    def tiled(self, rows: int) -> GoldenRows:
        """Repeats the rows until there are `rows`; returns them unchanged when there are enough."""
        if rows <= len(self):
            return self
        return replace(
            self,
            inputs={name: tile(values, rows) for name, values in self.inputs.items()},
            num=tile(self.num, rows),
            cat=tile(self.cat, rows),
            row=tile(self.row, rows),
        )


def tile(values: Array, rows: int) -> Array:
    """Repeats the first axis to `rows`."""
    return values if rows <= len(values) else values[np.arange(rows) % len(values)]


def read_golden_rows(
    dataset: Path, schema: Schema, numeric: Sequence[str], categorical: Sequence[str]
) -> GoldenRows:
    """Reads the golden rows of a dataset. Raises ExportFailed when there are none: without them nothing can be
    validated."""
    path = dataset / GOLDEN
    try:
        _refuse_twins(pq.read_schema(path).names)
        table = pq.read_table(path)
        num = _matrix(table, "num__", numeric, np.float32)
        cat = _matrix(table, "cat__", categorical, np.int32)
        row = np.asarray(table.column("row").to_numpy())
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ExportFailed(what="the golden rows", reason=f"{path}: {error}") from error
    if not len(row):
        raise ExportFailed(what="the golden rows", reason=f"{path} has none")
    return GoldenRows(
        table=table,
        inputs=to_wire(table, schema),
        numeric=tuple(numeric),
        categorical=tuple(categorical),
        num=num,
        cat=cat,
        row=row,
    )


def write_golden(folder: Path, golden: GoldenRows, outputs: Mapping[str, Array]) -> None:
    """Writes golden.parquet of a bundle."""
    table = golden.table
    for name, values in outputs.items():
        table = table.append_column(name, output_column(values))
    pq.write_table(table, folder / GOLDEN, compression="zstd")


def _refuse_twins(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            reason = (
                f"request column {name!r} has a name that Serin uses in that file; rename it in its table"
            )
            raise ExportFailed(what="the golden rows", reason=reason)


def _matrix(table: pa.Table, prefix: str, names: Sequence[str], dtype: type) -> Array:
    columns = [np.asarray(table.column(prefix + name).to_numpy()) for name in names]
    matrix = np.stack(columns, axis=1) if columns else np.zeros((len(table), 0))
    return np.ascontiguousarray(matrix.astype(dtype))
