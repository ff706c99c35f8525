"""Columns of a CSV file that hold nothing but NA and its like: missing numbers, or a region that is called so.

One file cannot tell, so its text is kept and the column is marked; the table's other files say what it is. Where none
of them does, it is text.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

_MARK = {b"serin": b"undecided"}


def undecided_field(name: str) -> pa.Field:
    return pa.field(name, pa.string(), metadata=_MARK)


def is_undecided(field: pa.Field) -> bool:
    return bool(field.metadata) and field.metadata.get(b"serin") == _MARK[b"serin"]


def types_of(schema: pa.Schema) -> dict[str, pa.DataType]:
    """The columns' types, null for the undecided: any other file's type is wider."""
    return {field.name: pa.null() if is_undecided(field) else field.type for field in schema}


def decided(types: dict[str, pa.DataType], undecided: Iterable[str]) -> dict[str, pa.DataType]:
    """The types of all files together, text where no file knew better."""
    return types | {name: pa.string() for name in undecided if pa.types.is_null(types[name])}
