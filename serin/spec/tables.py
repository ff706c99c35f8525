"""The long forms of an entry of `data.tables`: files with options, a Delta table, a SQL query."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from serin.spec.section import NAMES, Location, Section

_DIRECTIVES = re.compile(r"%(.)")
_KNOWN_DIRECTIVES = "YymdeHIMSpbBhjaATDFR%"


def _texts(value: Any) -> Any:
    """A single string needs no list, and an integer is taken as its digits."""
    if isinstance(value, dict):
        return {column: _texts(each) for column, each in value.items()}
    if isinstance(value, str | int) and not isinstance(value, bool):
        return (str(value),)
    if isinstance(value, list | tuple):
        if any(each is None or isinstance(each, bool | float) for each in value):
            raise ValueError("put each text in quotes: YAML reads some words and numbers as other types")
        return tuple(str(each) for each in value)
    return value


Texts = Annotated[
    tuple[str, ...] | dict[str, tuple[str, ...]],
    BeforeValidator(_texts, json_schema_input_type=str | list[str] | dict[str, str | list[str]]),
]
"""Texts for all columns, or column name -> texts for it."""


class FileTable(Section):
    """Files with options. All options but `path` are for CSV files: a table with one of them is read as CSV, whatever
    its files are called."""

    path: Location
    """Path or URL of a file, a folder or a glob."""
    delimiter: str | None = None
    """The character between the fields, such as `;`, `|` or `\\t`. By default a comma; in `.tsv` files a tab."""
    quote: str = Field(default='"', max_length=1)
    """The character around fields that hold delimiters or line ends. Empty: no field is quoted."""
    encoding: str = "utf-8"
    """How text is stored as bytes, such as `latin-1`, `cp1252` or `utf-16`. A byte order mark is skipped."""
    decimal: Literal[".", ","] | dict[str, Literal[".", ","]] = "."
    """The decimal mark of numbers, for all columns; or column name -> mark, and a point in the others."""
    thousands: Literal[",", ".", " ", "'", "_"] | None = None
    """The mark between groups of three digits. By default digits are not grouped."""
    null_values: Texts = ()
    """Texts that mean null, also in columns of strings: a list for all columns, or column name -> texts. The served
    model reads them as null too. Empty cells are null in any case."""
    date_formats: Texts = ()
    """Formats of dates and times in the notation of `strptime`, such as `%d.%m.%Y`: a list for all columns, or column
    name -> formats. The first that fits a value is used; ISO 8601 is always understood."""
    header: bool = True
    """Whether the first line holds the names of the columns."""
    names: tuple[str, ...] = ()
    """The names of the columns, instead of those in the header. Without both, they are column_1, column_2, ..."""

    @field_validator("delimiter", mode="before")
    @classmethod
    def _one_character(cls, value: Any) -> Any:
        value = {"\\t": "\t", "tab": "\t"}.get(value, value) if isinstance(value, str) else value
        if isinstance(value, str) and (len(value) != 1 or value in "\r\n" or ord(value) > 127):
            raise ValueError(f"{value!r} is not a delimiter: use one character, such as ';' or '\\t'")
        return value

    @field_validator("quote")
    @classmethod
    def _plain_character(cls, value: str) -> str:
        if value and (value in "\r\n" or ord(value) > 127):
            raise ValueError(f"{value!r} is not a quote character: use '\"', \"'\" or '' for none")
        return value

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            "".encode(value)
            return codecs.lookup(value).name
        except LookupError:
            raise ValueError(
                f"{value!r} is not an encoding: use for example utf-8, latin-1, cp1252 or utf-16"
            ) from None

    @field_validator("date_formats")
    @classmethod
    def _known_formats(cls, value: tuple[str, ...] | dict[str, tuple[str, ...]]) -> Any:
        lists = value.values() if isinstance(value, dict) else [value]
        for text in (each for formats in lists for each in formats):
            used = _DIRECTIVES.findall(text)
            unknown = [sign for sign in used if sign not in _KNOWN_DIRECTIVES]
            if not used or unknown:
                why = f"%{unknown[0]} is not supported" if unknown else "it names no part of a date"
                raise ValueError(f"{text!r} is not a date format: {why}; write for example %d.%m.%Y %H:%M")
        return value

    @field_validator("names")
    @classmethod
    def _each_name_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for name in value if value.count(name) > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} is named twice; give each column its own name")
        return value

    @model_validator(mode="after")
    def _marks_differ(self) -> Self:
        if self.thousands == self.decimal:
            raise ValueError(
                f"decimal and thousands are both {self.decimal!r}; set `decimal` to the other mark"
            )
        if self.quote and self.quote == self.delimiter:
            raise ValueError(f"delimiter and quote are both {self.quote!r}; change one of them")
        return self

    def nulls_of(self, column: str) -> tuple[str, ...]:
        """The texts that mean null in a column."""
        named = self.null_values
        return named.get(column, ()) if isinstance(named, dict) else named


class DeltaTable(Section):
    """A Delta table. Its files are those of one snapshot, in the order in which they were written."""

    delta: Location
    """Path or URL of the table's folder."""
    version: int | None = Field(default=None, ge=0)
    """The version to read. By default the newest."""
    as_of: datetime | None = None
    """Read the version that was the newest at this time, such as `2026-01-31T12:00:00Z`. Without a zone: UTC."""

    @field_validator("as_of")
    @classmethod
    def _in_utc(cls, value: datetime | None) -> datetime | None:
        return value if value is None or value.tzinfo is not None else value.replace(tzinfo=UTC)

    @model_validator(mode="after")
    def _one_snapshot(self) -> Self:
        if self.version is not None and self.as_of is not None:
            raise ValueError("set `version` or `as_of`, not both")
        return self


def _reference(value: str) -> str:
    kind, _, name = value.partition(":")
    if kind not in ("env", "file") or not name or "://" in value:
        raise ValueError(
            "must not hold the connection itself, since specs are stored with versions; put the URI into an "
            "environment variable and write env:NAME, or into a file and write file:PATH"
        )
    return value


Connection = Annotated[str, AfterValidator(_reference)]
"""A reference to a database's URI."""


class SqlTable(Section):
    """The rows of a SQL query, read through ADBC. They are read once for each dataset and kept with it."""

    sql: str
    """The query, without ORDER BY."""
    connection: Connection
    """Where the database's URI is kept: `env:NAME` for an environment variable, `file:PATH` for a file. The URI itself
    (`postgresql://...`, `sqlite:///...`) must not be in the spec."""
    order_by: Annotated[tuple[str, ...], Field(min_length=1), NAMES]
    """Columns of the query that order its rows completely: the position of a row is its id. A single name needs no
    list."""

    @field_validator("sql")
    @classmethod
    def _without_end(cls, value: str) -> str:
        return value.strip().rstrip(";").rstrip()


LongForm = FileTable | DeltaTable | SqlTable
_TAGS = {"delta": "<delta>", "sql": "<sql>"}


def _tag(value: Any) -> str:
    if isinstance(value, str):
        return "<path>"
    known = (
        value if isinstance(value, dict) else type(value).model_fields if isinstance(value, Section) else {}
    )
    return next((tag for key, tag in _TAGS.items() if key in known), "<file>")


TableSource = Annotated[
    Annotated[Location, Tag("<path>")]
    | Annotated[FileTable, Tag("<file>")]
    | Annotated[DeltaTable, Tag("<delta>")]
    | Annotated[SqlTable, Tag("<sql>")],
    Discriminator(_tag),
]
"""A path or URL, or a long form."""


def located(table: str | LongForm, absolute: Callable[[str], str]) -> str | LongForm:
    """The entry with an absolute path."""
    match table:
        case str():
            return absolute(table)
        case FileTable():
            return table.model_copy(update={"path": absolute(table.path)})
        case DeltaTable():
            return table.model_copy(update={"delta": absolute(table.delta)})
        case SqlTable() if table.connection.startswith("file:"):
            path = absolute(table.connection.removeprefix("file:"))
            return table.model_copy(update={"connection": f"file:{path}"})
    return table


def as_of(tables: Mapping[str, str | LongForm], moment: datetime) -> dict[str, str | LongForm]:
    """The tables with their Delta tables as they were at a moment, but for those whose version is given."""
    known = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return {
        name: table.model_copy(update={"as_of": known})
        if isinstance(table, DeltaTable) and table.version is None
        else table
        for name, table in tables.items()
    }
