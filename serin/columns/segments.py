"""Segments: the rows that share a value in a declared request column, such as carrier=AA."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from serin.formats.wire import Array

FEWEST_ROWS = 200
MOST_VALUES = 50  # of a column, the most frequent


def segment_masks(table: pa.Table, columns: Sequence[str]) -> dict[str, Array]:
    """For each value with enough rows: which rows have it. Ordered by column, then by falling number of rows."""
    found: dict[str, Array] = {}
    for column in columns:
        values = table.column(column).to_numpy(zero_copy_only=False)
        if values.dtype == object:
            values = values.astype(str)
        kinds, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
        for place in np.argsort(-counts, kind="stable")[:MOST_VALUES]:
            if counts[place] >= FEWEST_ROWS:
                found[f"{column}={kinds[place]}"] = codes == place
    return found
