"""How the CSV files of a table are written: what `data.tables.NAME` says besides the path."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

from serin.spec.tables import FileTable, LongForm

csv.field_size_limit(16 * 2**20)  # as a block of Arrow's reader; Python's own limit is 128 kB
_TABS = re.compile(r"\.tsv(\.\w+)?$")
Texts = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFormat:
    """The options of FileTable in a form that can be hashed. `decimal`, `null_values` and `date_formats` are for all
    columns, the fields `of_column_...` for those they name."""

    delimiter: str | None = None
    quote: str = '"'
    encoding: str = "utf-8"
    decimal: str = "."
    of_column_decimals: tuple[tuple[str, str], ...] = ()
    thousands: str = ""
    null_values: tuple[str, ...] = ()
    of_column_nulls: Texts = ()
    date_formats: tuple[str, ...] = ()
    of_column_dates: Texts = ()
    header: bool = True
    names: tuple[str, ...] = ()

    def delimiter_of(self, path: str) -> str:
        """The delimiter of the file at `path`: its ending decides where none is given."""
        return self.delimiter or ("\t" if _TABS.search(path.lower()) else ",")

    @property
    def text_encoding(self) -> str:
        """The codec for Python's readers, which skips a byte order mark."""
        return "utf-8-sig" if self.encoding == "utf-8" else self.encoding

    @property
    def named_columns(self) -> dict[str, str]:
        """The columns that options name -> the option."""
        named = {
            "null_values": self.of_column_nulls,
            "date_formats": self.of_column_dates,
            "decimal": self.of_column_decimals,
        }
        return {name: option for option, columns in named.items() for name, _ in columns}

    def decimal_of(self, column: str) -> str:
        return dict(self.of_column_decimals).get(column, self.decimal)

    def nulls_of(self, column: str) -> tuple[str, ...]:
        return dict(self.of_column_nulls).get(column, self.null_values)

    def dates_of(self, column: str) -> tuple[str, ...]:
        return dict(self.of_column_dates).get(column, self.date_formats)


PLAIN = CsvFormat()


def csv_format(table: str | LongForm | None) -> CsvFormat | None:
    """The format that the table's entry names; None when it names no option."""
    if not isinstance(table, FileTable):
        return None
    nulls, dates, decimal = table.null_values, table.date_formats, table.decimal
    form = CsvFormat(
        delimiter=table.delimiter,
        quote=table.quote,
        encoding=table.encoding,
        decimal="." if isinstance(decimal, dict) else decimal,
        of_column_decimals=tuple(decimal.items()) if isinstance(decimal, dict) else (),
        thousands=table.thousands or "",
        null_values=() if isinstance(nulls, dict) else nulls,
        of_column_nulls=tuple(nulls.items()) if isinstance(nulls, dict) else (),
        date_formats=() if isinstance(dates, dict) else dates,
        of_column_dates=tuple(dates.items()) if isinstance(dates, dict) else (),
        header=table.header,
        names=table.names,
    )
    return None if form == PLAIN else form
