"""How a CSV cell becomes a value. The ETL and the reading of rows to be scored share these rules, so that a row means
the same in training and in serving. Options of the table decide about null texts, number marks and dates.

In a column of text only the empty cell is null: NA may be a region, and None a name. In a column of numbers, booleans
or times the words below are null too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from serin.formats.csv_format import CsvFormat
from serin.formats.nulls import is_null_string, without_null_strings

NULL_WORDS = (
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA", "NULL", "NaN",
    "n/a", "nan", "null",
)  # fmt: skip
TRUE_WORDS = ("1", "True", "TRUE", "true")
FALSE_WORDS = ("0", "False", "FALSE", "false")
_TIME = pa.timestamp("us")
_SPACES = r"[\x{00a0}\x{202f}]"  # the spaces that French texts put between digits
_WORDS = r"^[+-]?(?i:inf|infinity|nan)$"
_CENTURY = np.timedelta64(1200, "M")
_FIRST_YEAR = 1000  # %Y reads "24" as the year 24


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRules:
    """The rules of one column."""

    null_values: tuple[str, ...] = ()
    decimal: str = "."
    thousands: str = ""
    date_formats: tuple[str, ...] = ()

    @classmethod
    def of(cls, form: CsvFormat, column: str) -> CellRules:
        return cls(
            null_values=form.nulls_of(column),
            decimal=form.decimal_of(column),
            thousands="" if form.thousands == form.decimal_of(column) else form.thousands,
            date_formats=form.dates_of(column),
        )

    def is_named_null(self, texts: pa.Array) -> pa.Array:
        """Which cells are empty or one of the texts that the table's options name."""
        return is_null_string(texts, self.null_values)

    def is_null(self, texts: pa.Array) -> pa.Array:
        """Which cells are null in a column that is not text."""
        return is_null_string(texts, (*NULL_WORDS, *self.null_values))

    def without_nulls(self, texts: pa.Array) -> pa.Array:
        """The cells with nulls where they are null in a column that is not text."""
        return without_null_strings(texts, (*NULL_WORDS, *self.null_values))

    def converted(self, texts: pa.Array, kind: pa.DataType) -> pa.Array:
        """The cells as values of a type; ArrowInvalid when one of them is not."""
        if pa.types.is_null(kind):
            return pa.nulls(len(texts))
        if pa.types.is_string(kind):
            return without_null_strings(texts, self.null_values) if self.null_values else texts
        values = self.without_nulls(texts)
        if pa.types.is_boolean(kind):
            return _booleans(values)
        if pa.types.is_timestamp(kind):
            return self._times(values) if self.date_formats and kind == _TIME else pc.cast(values, kind)
        return pc.cast(self._numbers(pc.utf8_trim(values, " \t")), kind)

    def _numbers(self, texts: pa.Array) -> pa.Array:
        """The texts with the marks that Arrow reads."""
        if self.decimal == "." and not self.thousands:
            return texts
        if self.thousands == " ":
            texts = pc.replace_substring_regex(texts, _SPACES, " ")
        group, point = re.escape(self.thousands), re.escape(self.decimal)
        whole = rf"(\d+|\d{{1,3}}({group}\d{{3}})+)" if self.thousands else r"\d+"
        number = rf"^[+-]?({whole}({point}\d*)?|{point}\d+)([eE][+-]?\d+)?$"
        fits = pc.or_(pc.match_substring_regex(texts, number), pc.match_substring_regex(texts, _WORDS))
        if not pc.all(fits, min_count=0).as_py():
            raise pa.ArrowInvalid("a cell is not a number with these marks")
        if self.thousands:
            texts = pc.replace_substring(texts, self.thousands, "")
        return pc.replace_substring(texts, self.decimal, ".")

    def _times(self, texts: pa.Array) -> pa.Array:
        """Each text by the first format that fits it, else as ISO 8601."""
        texts = pc.utf8_trim(texts, " \t")
        found = pa.nulls(len(texts), _TIME)
        for form in self.date_formats:
            read = pc.strptime(texts, format=form, unit="us", error_is_null=True)
            if "%y" in form:
                read = _not_in_the_future(read)
            if "%Y" in form:
                read = pc.if_else(pc.less(pc.year(read), _FIRST_YEAR), pa.scalar(None, _TIME), read)
            found = pc.coalesce(found, read)
        left = pc.and_(pc.is_null(found), pc.is_valid(texts))
        if not pc.any(left, min_count=0).as_py():
            return found
        return pc.replace_with_mask(found, left, pc.cast(texts.filter(left), _TIME))


def _not_in_the_future(times: pa.Array) -> pa.Array:
    """Moves times after now back by a century: strptime takes the two-digit years 00 to 68 for 2000 to 2068."""
    later = pc.greater(times, pa.scalar(datetime.now(UTC).replace(tzinfo=None), _TIME))
    if not pc.any(later, min_count=0).as_py():
        return times
    found = times.filter(later).to_numpy(zero_copy_only=False).astype("datetime64[us]")
    month = found.astype("datetime64[M]")
    before = (month - _CENTURY).astype("datetime64[us]") + (found - month)
    return pc.replace_with_mask(times, pc.fill_null(later, False), pa.array(before, _TIME))


def _booleans(values: pa.Array) -> pa.Array:
    true = pc.is_in(values, value_set=pa.array(TRUE_WORDS))
    known = pc.or_(true, pc.is_in(values, value_set=pa.array([*FALSE_WORDS, None], pa.string())))
    if not pc.all(known, min_count=0).as_py():
        raise pa.ArrowInvalid("a cell is not a boolean")
    return pc.if_else(pc.is_null(values), pa.scalar(None, pa.bool_()), true)
