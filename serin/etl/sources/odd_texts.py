"""Says which value makes a text of a column that is numbers otherwise. Slow, and only asked to explain a refusal."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.etl.sources.files import file_format, open_parquet, origin_of
from serin.formats.csv_values import is_null_word
from serin.formats.dataset import SourceFile

_NUMBER = r"^\s*[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+|inf|nan)\s*$"
_COMMA = r"^\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?\s*$"


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
                return _decimal_comma(values, file)
            shown = values[first].as_py()[:60]
            text = f"row {row + first} of {origin_of(file).path} holds {shown!r}, which is not a number"
            return f"{text}{_advice(file, 'if it means null, name it in', 'null_values')}"
        row += len(values)
    return "its values are numbers, stored as text" if row else None


def _decimal_comma(values: pa.ChunkedArray, file: SourceFile) -> str | None:
    """Why a column is text, when its numbers have a decimal comma."""
    numbers = (
        pc.or_(pc.match_substring_regex(values, _COMMA), is_null_word(values)).fill_null(True).to_numpy()
    )
    if numbers.mean() < 0.5:
        return None
    return f"its numbers have a decimal comma{_advice(file, 'set', 'decimal')}"


def _advice(file: SourceFile, what: str, option: str) -> str:
    """The option that helps with a CSV file; nothing for another format."""
    origin = origin_of(file)
    return f"; {what} data.tables.{origin.table}.{option}" if file_format(origin) == "csv" else ""
