"""A piece prepared for a GPU: relational work on the host, features' columns on the device.

Columns of numbers that no relational work looks at are decoded by cuDF, on the GPU itself; text is read on the host,
as codes into a dictionary, which costs less than making text of it anywhere.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from serin.etl.device import count_rescue, gpu_columns, to_gpu
from serin.etl.engine import Engine, Held
from serin.etl.layout import Layout
from serin.etl.partitions import Read
from serin.etl.past import hold_prepared
from serin.etl.relation import LoadedJoin, Prepared, prepare
from serin.etl.tables import Piece, Table
from serin.features.column import Column, take
from serin.formats.schema import INT64_NULL
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec

_NAME = re.compile(r"`[^`]+`|[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`columns`: those that go to the GPU; `decoded`: those among them that cuDF reads."""

    columns: frozenset[str]
    decoded: frozenset[str]


def place_columns(data: DataSpec, features: Sequence[FeatureSpec], layout: Layout, table: Table) -> Placement:
    columns = gpu_columns(features)
    if importlib.util.find_spec("cudf") is None or not all(_local(group.file.path) for group in table.groups):
        return Placement(columns=columns, decoded=frozenset())
    seen = _names_in(data) | {key for group in table.groups for key, _ in group.file.partition}
    decoded = {
        read.column
        for read in layout.reads
        if read.column in columns
        and read.column not in seen
        and not read.exact
        and read.kind in ("float", "int", "bool")
        and _decodable(table.types[read.column])
    }
    return Placement(columns=columns, decoded=frozenset(decoded))


def hold_pieces(
    engine: Engine,
    pieces: Sequence[Piece],
    data: DataSpec,
    features: Sequence[FeatureSpec],
    layout: Layout,
    joins: Sequence[LoadedJoin],
    table: Table,
    scratch: Path,
) -> Held:
    """The prepared pieces, held by the engine; on its GPU what is made into features there."""
    if (
        not engine.gpu or data.unique is not None or layout.windows
    ):  # these need the rows of all pieces, on the host
        return hold_prepared(engine, pieces, data, layout, joins, scratch)
    placement = place_columns(data, features, layout, table)
    return engine.hold(prepare_on_gpu, pieces, data, layout, joins, placement)


def prepare_on_gpu(
    piece: Piece, data: DataSpec, layout: Layout, joins: Sequence[LoadedJoin], placement: Placement
) -> Prepared:
    """What `prepare` makes, with the placed columns on the GPU; all on the host when the GPU is full."""
    try:
        return _prepare_on_gpu(piece, data, layout, joins, placement)
    except MemoryError:
        count_rescue()
        return prepare(piece, data, layout, joins)


def _prepare_on_gpu(
    piece: Piece, data: DataSpec, layout: Layout, joins: Sequence[LoadedJoin], placement: Placement
) -> Prepared:
    here = tuple(read for read in layout.reads if read.column not in placement.decoded)
    kept = tuple(name for name in layout.kept if name not in placement.decoded)
    prepared = prepare(piece, data, replace(layout, reads=here, kept=kept), joins)
    columns = {
        name: to_gpu(column) if name in placement.columns else column
        for name, column in prepared.columns.items()
    }
    if placement.decoded:
        there = _decode(piece, [read for read in layout.reads if read.column in placement.decoded])
        if len(prepared.rows) < piece.rows:
            there = take(there, prepared.rows - piece.first_row)
        columns |= there
    return replace(prepared, columns={name: columns[name] for name in layout.kept})


def _decode(piece: Piece, reads: Sequence[Read]) -> Mapping[str, Column]:
    import cudf

    names = [read.column for read in reads]
    frame = cudf.read_parquet(
        piece.file.path, columns=names, row_groups=list(piece.groups), use_pandas_metadata=False
    )
    return {read.column: Column(kind=read.kind, values=_values(frame[read.column], read)) for read in reads}


def _values(series: Any, read: Read) -> Any:
    """The arrays that `column_from_arrow` would make, from a cuDF column."""
    import cupy

    if read.kind == "bool":
        series = series.astype("int8")
    missing: Any = np.int8(-1)
    null = series.isna().values if series.has_nulls else None
    values = (series if null is None else series.fillna(0)).values
    if read.kind == "float":
        if values.dtype.kind != "f":  # as the host does: by way of float64
            values = values.astype(np.float64)
        values, missing = values.astype(np.float32, copy=False), np.float32("nan")
    elif read.kind == "int":
        values, missing = values.astype(np.int64, copy=False), np.int64(INT64_NULL)
    return values if null is None else cupy.where(null, missing, values)


def _decodable(arrow: pa.DataType) -> bool:
    numbers = pa.types.is_float32(arrow) or pa.types.is_float64(arrow) or pa.types.is_integer(arrow)
    return bool(numbers or pa.types.is_boolean(arrow)) and not pa.types.is_uint64(arrow)


def _local(path: str) -> bool:
    return "://" not in path


def _names_in(data: DataSpec) -> set[str]:
    """Every name that stands anywhere in the data section: relational work may look at such a column."""
    text = json.dumps(data.model_dump(mode="json"), ensure_ascii=False)
    return {name.strip("`") for name in _NAME.findall(text)} | set(data.target.columns)
