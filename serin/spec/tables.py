"""The long forms of an entry of `data.tables`: files with options for reading them."""

from __future__ import annotations

import codecs
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from serin.spec.section import Section

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

    path: str
    """Path or URL of a file, a folder or a glob."""
    delimiter: str | None = None
    """The character between the fields, such as `;`, `|` or `\\t`. By default a comma; in `.tsv` files a tab."""
    quote: str = Field(default='"', max_length=1)
    """The character around fields that hold delimiters or line ends. Empty: no field is quoted."""
    encoding: str = "utf-8"
    """How text is stored as bytes, such as `latin-1`, `cp1252` or `utf-16`. A byte order mark is skipped."""
    decimal: Literal[".", ","] = "."
    """The decimal mark of numbers."""
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


def _tag(value: Any) -> str:
    return "<path>" if isinstance(value, str) else "<file>"


TableSource = Annotated[
    Annotated[str, Tag("<path>")] | Annotated[FileTable, Tag("<file>")], Discriminator(_tag)
]
"""A path or URL, or its long form."""


def path_of(table: str | FileTable) -> str:
    """The path or URL behind an entry of `data.tables`."""
    return table if isinstance(table, str) else table.path
