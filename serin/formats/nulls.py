"""Says what is null. ETL, the served graph, records, drift, labels and bulk scoring all ask here.

Null are: the reserved value of a kind on the wire (NaN, the smallest int64, -1 for a boolean), the empty string, and
the texts that `null_values` of the column's table names (`InputColumn.null_texts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.schema import INT64_NULL, Kind

TYPE_OF_KIND: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "float": pa.float32(),
    "int": pa.int64(),
    "timestamp": pa.timestamp("us"),
    "bool": pa.bool_(),
}


_MOST = 2**63 - 1  # of an integer in the records; larger ones become it


def null_of(kind: Kind | str) -> float | int:
    """The value that means null in an array in wire form; for strings their code."""
    if kind == "float":
        return float("nan")
    return INT64_NULL if kind in ("int", "timestamp") else -1


def is_null(kind: Kind | str, values: Any) -> npt.NDArray[np.bool_]:
    """Which values of an array in wire form, of numpy or cupy, are null; for strings of an array of their codes."""
    null: npt.NDArray[np.bool_] = np.isnan(values) if kind == "float" else values == null_of(kind)
    return null


def null_strings(null_texts: Sequence[str] = ()) -> list[str]:
    """The strings that are null in a column of strings; the first is the one that travels to a model."""
    return list(dict.fromkeys(["", *null_texts]))


def is_null_string(texts: pa.Array | pa.ChunkedArray, null_texts: Sequence[str] = ()) -> Any:
    """Which strings are null; false for a true null."""
    return pc.is_in(texts, value_set=pa.array(null_strings(null_texts), texts.type))


def without_null_strings(texts: pa.Array | pa.ChunkedArray, null_texts: Sequence[str] = ()) -> Any:
    """The strings with true nulls in the place of those that are null."""
    return pc.if_else(is_null_string(texts, null_texts), pa.scalar(None, texts.type), texts)


def parse_times(texts: pa.ChunkedArray) -> Any:
    """The times that strings name. ArrowInvalid when one of them is not a time."""
    texts = without_null_strings(texts)
    try:
        return texts.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:
        return texts.cast(pa.timestamp("us", tz="UTC"))  # every value names its zone


def from_wire(kind: str, values: pa.Array | npt.NDArray[Any], null_texts: Sequence[str] = ()) -> pa.Array:
    """Values as a request brings them, strings as an Arrow array, with their natural type and true nulls."""
    if kind == "string":
        return without_null_strings(values, null_texts)
    null = is_null(kind, values)
    mask = null if null.any() else None  # without one, numbers are not copied
    if kind == "bool":
        return pa.array(values == 1, pa.bool_(), mask=mask)
    if values.dtype == np.uint64:
        values = np.minimum(values, np.uint64(_MOST))
    plain = pa.float32() if kind == "float" else pa.int64()
    return pa.array(values, plain, mask=mask).cast(TYPE_OF_KIND[kind])
