"""Segments: the rows that share a value in a declared request column, such as carrier=AA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import kind_of_type
from serin.formats.schema import INT64_NULL
from serin.formats.wire import Array

FEWEST_ROWS = 200
_NULLS = ("", "nan", str(INT64_NULL))
MOST_VALUES = 50  # of a column, the most frequent


def segment_masks(table: pa.Table, columns: Sequence[str]) -> dict[str, Array]:
    """For each value with enough rows: which rows have it. Ordered by column, then by falling number of rows."""
    masks = group_masks(table, columns)
    return {name: mask for name, mask in masks.items() if np.count_nonzero(mask) >= FEWEST_ROWS}


def group_masks(table: pa.Table, columns: Sequence[str]) -> dict[str, Array]:
    """For each of the most frequent values, however few rows have it: which rows do. `table` is in wire form."""
    found: dict[str, Array] = {}
    for column in columns:
        values = table.column(column)
        for name, mask in _texts(values) if kind_of_type(values.type) == "string" else _numbers(values):
            found[f"{column} is null" if name in _NULLS else f"{column}={name}"] = mask
    return found


def _texts(values: pa.ChunkedArray) -> Iterator[tuple[str, Array]]:
    """The most frequent strings. Never as numpy's own texts: each row would be as wide as the longest one."""
    kind = pa.string() if pa.types.is_dictionary(values.type) else values.type
    coded = pc.fill_null(values.cast(kind), "").combine_chunks().dictionary_encode()
    codes = coded.indices.to_numpy()
    counts = pa.table(
        {"count": np.bincount(codes, minlength=len(coded.dictionary)), "text": coded.dictionary}
    )
    order = pc.sort_indices(counts, [("count", "descending"), ("text", "ascending")])
    for place in order[:MOST_VALUES].to_pylist():
        yield coded.dictionary[place].as_py(), codes == place


def _numbers(values: pa.ChunkedArray) -> Iterator[tuple[str, Array]]:
    kinds, codes, counts = np.unique(values.to_numpy(), return_inverse=True, return_counts=True)
    for place in np.argsort(-counts, kind="stable")[:MOST_VALUES]:
        value = kinds[place]
        is_null = value.dtype == np.int8 and int(value) == -1
        yield "" if is_null else str(value), codes == place
