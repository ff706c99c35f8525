"""Says which value makes a text of a column that is numbers otherwise. Slow, and only asked to explain a refusal."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.etl.sources.files import open_parquet, origin_of
from serin.formats.csv_values import is_null_word
from serin.formats.dataset import SourceFile

_NUMBER = r"^\s*[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+|inf|nan)\s*$"


def odd_text(file: SourceFile, column: str) -> str | None:
    """Returns the first value that is not a number in a string column with mostly numbers; None if there is none."""
    source = open_parquet(file)
    row = 0
    for index in range(source.metadata.num_row_groups):
        values = source.read_row_group(index, columns=[column]).column(column)
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            return None
        number = pc.or_(pc.match_substring_regex(values, _NUMBER), is_null_word(values))
        numeric = number.fill_null(True).to_numpy()
        if not numeric.all():
            first = int(np.argmin(numeric))
            if numeric.mean() < 0.5:
                return None
            shown = values[first].as_py()[:60]
            return f"row {row + first} of {origin_of(file).path} holds {shown!r}, which is not a number"
        row += len(values)
    return "its values are numbers, stored as text" if row else None
