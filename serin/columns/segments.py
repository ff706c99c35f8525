"""Segments: the rows that share a value in a declared request column, such as carrier=AA."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

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
        values = table.column(column).to_numpy(zero_copy_only=False)
        if values.dtype == object:
            values = values.astype(str)
        kinds, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
        for place in np.argsort(-counts, kind="stable")[:MOST_VALUES]:
            found[_name(column, kinds[place])] = codes == place
    return found


def _name(column: str, value: np.generic) -> str:
    null = str(value) in _NULLS or (value.dtype == np.int8 and int(value) == -1)
    return f"{column} is null" if null else f"{column}={value}"
