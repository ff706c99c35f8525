"""A many-to-one lookup by one key, in arrays and in the ONNX graph. A key that is null or unknown finds nulls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from serin.columns.column import Column, column_from_arrow, kind_of_type
from serin.columns.keys import KeyIndex

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

_INT64 = 7  # onnx.TensorProto.INT64


def lookup(table: pa.Table, key: str, keys: Column, columns: Iterable[str]) -> dict[str, Column]:
    """For each of `keys` the row of `table` with that key: its `columns`."""
    found = KeyIndex([_column(table, key)]).find([keys])
    return {name: _column(table, name).take_or_null(found) for name in columns}


def lookup_to_onnx(
    graph: GraphBuilder, table: pa.Table, key: str, key_input: str, columns: Iterable[str]
) -> dict[str, str]:
    """The same in the graph: key_input is the key's rank-1 tensor in wire form, and so are the results."""
    keys = _column(table, key)
    rows = np.flatnonzero(~keys.null)
    known = (
        keys[rows].to_wire().tolist() or [""]
        if keys.kind == "string"
        else keys[rows].to_wire().tolist() or [0]
    )
    if keys.kind == "bool":
        key_input = graph.op("Cast", key_input, to=_INT64)
    # An encoder needs at least one key; without rows, that key maps to the null row like every other one.
    place = label_encoder(graph, key_input, keys=known, places=list(range(len(known))), default=len(rows))
    found = {}
    for name in columns:
        column = _column(table, name).take_or_null(np.append(rows, -1))  # the last row is for unknown keys
        found[name] = graph.op("Gather", graph.constant(column.to_wire(), f"lookup_{name}"), place, axis=0)
    return found


def _column(table: pa.Table, name: str) -> Column:
    values = table.column(name)
    kind = kind_of_type(values.type)
    assert kind is not None, name
    return column_from_arrow(values, kind)


def label_encoder(
    graph: GraphBuilder,
    values: str,
    *,
    keys: Sequence[str] | Sequence[int],
    places: Sequence[int],
    default: int,
) -> str:
    """int64: the place of the key that a value equals, else `default`. At least one key; all of one type."""
    attributes: dict[str, Any] = {
        "keys_strings" if isinstance(keys[0], str) else "keys_int64s": list(keys),
        "values_int64s": list(places),
        "default_int64": default,
    }
    places_found: str = graph.op("LabelEncoder", values, domain="ai.onnx.ml", **attributes)
    return places_found
