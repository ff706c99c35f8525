"""How a cell of a CSV column becomes a value when options of the table decide it: null texts, number marks, dates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.csv_format import CsvFormat
from serin.formats.csv_values import FALSE_WORDS, NULL_WORDS, TRUE_WORDS
from serin.formats.nulls import is_null_string

_TIME = pa.timestamp("us")
_SPACES = r"[\x{00a0}\x{202f}]"  # the spaces that French texts put between digits
_WORDS = r"^[+-]?(?i:inf|infinity|nan)$"
_CENTURY = np.timedelta64(1200, "M")
_FIRST_YEAR = 1000  # %Y reads "24" as the year 24


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
        return _without(texts, self.is_null(texts))

    def converted(self, texts: pa.Array, kind: pa.DataType) -> pa.Array:
        """The cells as values of a type; ArrowInvalid when one of them is not."""
        if pa.types.is_null(kind):
            return pa.nulls(len(texts))
        if pa.types.is_string(kind):
            return _without(texts, self.is_named_null(texts)) if self.null_values else texts
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


def _without(texts: pa.Array, null: pa.Array) -> pa.Array:
    return pc.if_else(null, pa.scalar(None, texts.type), texts)
