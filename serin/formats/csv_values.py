"""How a CSV cell becomes a value. The ETL and the reading of rows to be scored share these rules, so that a row means
the same in training and in serving.

In a column of text only the empty cell is null: NA may be a region, and None a name. In a column of numbers, booleans
or times the words below are null too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.csv as pa_csv

from serin.formats.nulls import is_null_string, without_null_strings

NULL_WORDS = (
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA", "NULL", "NaN",
    "n/a", "nan", "null",
)  # fmt: skip
TRUE_WORDS = ("1", "True", "TRUE", "true")
FALSE_WORDS = ("0", "False", "FALSE", "false")


def parse_options(delimiter: str = ",", quote: str = '"') -> pa_csv.ParseOptions:
    """A value in quotes may hold line ends, wherever in the file it is. `quote`: "" when no value is quoted."""
    return pa_csv.ParseOptions(delimiter=delimiter, quote_char=quote or False, newlines_in_values=bool(quote))


def convert_options(
    types: Mapping[str, pa.DataType],
    columns: Sequence[str] = (),
    *,
    decimal: str = ".",
    null_values: Sequence[str] = (),
) -> pa_csv.ConvertOptions:
    """`types`: of columns whose type is known; the others' are inferred. `columns`: those to read; none means all.
    `null_values`: texts that are null besides the usual ones, in columns that are not text."""
    return pa_csv.ConvertOptions(
        column_types=dict(types),
        include_columns=list(columns),
        null_values=["", *NULL_WORDS, *null_values],
        decimal_point=decimal,
        true_values=list(TRUE_WORDS),
        false_values=list(FALSE_WORDS),
        strings_can_be_null=False,  # "" equals null in every column of text
    )


def is_null_word(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Which of the cells are empty or one of the words that mean null outside of columns of text."""
    return is_null_string(texts, NULL_WORDS)


def without_null_words(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The cells of a column that is not text but was read as text, with nulls for the words that mean null."""
    return without_null_strings(texts, NULL_WORDS)
