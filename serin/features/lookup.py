"""A many-to-one lookup by one key, in arrays and in the ONNX graph. A key that is null or unknown finds nulls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from serin.features.column import Column, column_from_arrow, kind_of_type
from serin.features.keys import KeyIndex

if TYPE_CHECKING:
    from serin.features.graph import GraphBuilder


def lookup(table: pa.Table, key: str, keys: Column, columns: Iterable[str]) -> dict[str, Column]:
    """For each of `keys` the row of `table` with that key: its `columns`."""
    found = KeyIndex([_column(table, key)]).find([keys])
    return {name: _column(table, name).take_or_null(found) for name in columns}


def lookup_to_onnx(
    graph: GraphBuilder, table: pa.Table, key: str, key_input: str, columns: Iterable[str]
) -> dict[str, str]:
    """The same in the graph: key_input is the key's rank-1 tensor in wire form, the results are too."""
    keys = _column(table, key)
    present = ~keys.null
    rows = np.flatnonzero(present)
    place = graph.op("LabelEncoder", *_encoder_input(graph, keys, key_input), domain="ai.onnx.ml", **_encoder(keys, rows))
    found = {}
    for name in columns:
        column = _column(table, name).take_or_null(np.append(rows, -1))  # the last row is what an unknown key finds
        found[name] = graph.op("Gather", graph.constant(column.to_wire(), f"lookup_{name}"), place, axis=0)
    return found


def _encoder(keys: Column, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Mapping[str, object]:
    values = keys.to_wire()[rows].tolist()
    places = {"values_int64s": list(range(len(rows))), "default_int64": len(rows)}
    if not values:  # an encoder needs one key: null, which finds the null row as every other key does
        values, places["values_int64s"] = [keys[:0].to_wire().dtype.type() if keys.kind != "string" else ""], [0]
    return {("keys_strings" if keys.kind == "string" else "keys_int64s"): values, **places}


def _encoder_input(graph: GraphBuilder, keys: Column, key_input: str) -> tuple[str]:
    if keys.kind == "bool":
        return (graph.op("Cast", key_input, to=7),)  # TensorProto.INT64
    return (key_input,)


def _column(table: pa.Table, name: str) -> Column:
    values = table.column(name)
    kind = kind_of_type(values.type)
    assert kind is not None, name
    return column_from_arrow(values, kind)
