"""A table's columns in the form in which they travel to a model: one [rows, 1] array per request column
([rows, *dims] for a model with custom inputs).

Nulls become reserved values (schema.NULL_OF_KIND), and a column that is in wire form already passes
unchanged, so the conversion may be applied twice. What cannot be carried exactly is refused, never bent;
the one exception is float64, which becomes float32 as it does in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.errors import RowsUnfit, nearest
from serin.formats.nulls import TYPE_OF_KIND, parse_times, without_null_strings
from serin.formats.schema import DTYPE_OF_KIND, ELSEWHERE, INT64_NULL, InputColumn, Schema
from serin.formats.serving.recorded import NUMBERS

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawRows:
    """Rows of a split as requests would bring them, oldest first. `table`: the request columns in wire form. `target`:
    as the dataset has it."""

    table: pa.Table
    target: Array
    row: Array

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRows:
    """Rows of the training split as requests would bring them, with natural types and true nulls, in the order of time
    where there is one. `times`: seconds since 1970. `total`: how many rows they are an even sample of."""

    table: pa.Table
    times: Array | None
    total: int

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def thinned(self, step: int) -> TrainingRows:
        """Every `step`-th row."""
        if step == 1:
            return self
        chosen = np.arange(0, len(self), step)
        times = None if self.times is None else self.times[chosen]
        return TrainingRows(table=self.table.take(pa.array(chosen)), times=times, total=self.total)


def to_wire(table: pa.Table | pd.DataFrame, schema: Schema) -> dict[str, Array]:
    """The schema's columns out of `table`; RowsUnfit names one that does not fit. Others are left alone."""
    rows = as_arrow(table)
    known = set(rows.column_names)
    for column in schema.inputs:
        if column.name not in known:
            raise RowsUnfit(column=column.name, reason=f"is missing{nearest(column.name, known)}")
    return {column.name: wire_column(rows.column(column.name), column) for column in schema.inputs}


def as_arrow(table: pa.Table | pd.DataFrame) -> pa.Table:
    """`table` as an Arrow table, without the index of a frame."""
    if isinstance(table, pa.Table):
        return table
    try:
        return pa.Table.from_pandas(table, preserve_index=False)
    except pa.ArrowException as error:
        raise RowsUnfit(column="", reason=f"cannot be read as a table: {error}") from error


def wire_column(values: pa.ChunkedArray, column: InputColumn) -> Array:
    """One column as a [rows, *dims] array of the column's wire type."""
    rows = len(values)
    if column.dims != (1,):
        values = _flattened(values, column)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if pa.types.is_null(values.type):
        values = values.cast(TYPE_OF_KIND[column.kind])
    if pa.types.is_string_view(values.type):  # for which Arrow lacks functions
        values = values.cast(pa.large_string())
    try:
        flat = (
            _CONVERT[column.kind](values) if column.kind != "string" else _strings(values, column.null_texts)
        )
    except (pa.ArrowException, ValueError, UnicodeDecodeError) as error:
        raise RowsUnfit(
            column=column.name, reason=f"has type {values.type}, the model asks for {column.kind}: {error}"
        ) from error
    if column.source == ELSEWHERE and column.dtype != DTYPE_OF_KIND[column.kind]:
        flat = _as_sent(flat, column)
    return flat.reshape(rows, *column.dims)


def _as_sent(values: Array, column: InputColumn) -> Array:
    """The values in the type of a server that Serin does not run, which has no reserved value for null."""
    sent = values.astype(NUMBERS[column.dtype])
    if column.kind != "float" and not np.array_equal(sent.astype(values.dtype), values):
        raise RowsUnfit(column=column.name, reason=f"has a null, or a value that is not a {column.dtype}")
    return sent


def _flattened(values: pa.ChunkedArray, column: InputColumn) -> pa.ChunkedArray:
    """The values of all rows, one after the other, from lists (of lists) that have the right number for each row."""
    rows, wanted = len(values), math.prod(column.dims)
    if values.null_count:
        raise RowsUnfit(column=column.name, reason="has rows without a value; the model needs one in each")
    while _is_list(values.type):
        counts = pc.list_value_length(values)
        if len(counts) and pc.min(counts).as_py() != pc.max(counts).as_py():
            raise RowsUnfit(column=column.name, reason="has rows of different sizes")
        values = pc.list_flatten(values)
    if len(values) != rows * wanted:
        each = len(values) / rows if rows else 0
        shape = "x".join(map(str, column.dims))
        reason = f"holds {each:g} values in a row, the model asks for {wanted} ({shape})"
        raise RowsUnfit(column=column.name, reason=reason)
    return values


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _strings(values: pa.ChunkedArray, null_texts: Sequence[str]) -> Array:
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        values = values.cast(pa.large_string())  # refuses what is not UTF-8
    elif not _is_text(values.type):
        raise ValueError("convert it to text first, as it was in the training table")
    if null_texts:
        values = without_null_strings(values, null_texts)
    return np.asarray(values.fill_null("").to_numpy(), dtype=object)


def _floats(values: pa.ChunkedArray) -> Array:
    if pa.types.is_integer(values.type) or pa.types.is_decimal(values.type):
        values = values.cast(pa.float64(), safe=False)
    elif not pa.types.is_floating(values.type):
        raise ValueError("convert it to a number first")
    if values.null_count:
        values = values.fill_null(pa.scalar(float("nan"), type=values.type))
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, in training too
        return np.asarray(values.to_numpy()).astype(np.float32)


def _ints(values: pa.ChunkedArray) -> Array:
    if pa.types.is_integer(values.type):
        return _filled(values.cast(pa.int64()))
    if not pa.types.is_floating(values.type):
        raise ValueError("convert it to integers first")
    numbers = values.cast(pa.float64()).fill_null(float("nan")).to_numpy()
    present = ~np.isnan(numbers)  # a frame turns integers into floats as soon as one is missing
    whole = numbers[present]
    if not np.all(np.trunc(whole) == whole):
        raise ValueError("it holds numbers that are not whole")
    bits = _EXACT_BITS[values.type.bit_width]
    if not np.all(np.abs(whole) < 2.0**bits):  # from there on several integers become the same float
        raise ValueError(
            f"it holds integers of 2^{bits} or more as floats, which round them; keep them as integers from where "
            "they are read (in pandas the dtype 'Int64', which has nulls)"
        )
    result = np.full(len(numbers), INT64_NULL, dtype=np.int64)
    result[present] = whole.astype(np.int64)
    return result


def _timestamps(values: pa.ChunkedArray) -> Array:
    if pa.types.is_integer(values.type):
        return _filled(values.cast(pa.int64()))  # microseconds already
    if _is_text(values.type):
        values = parse_times(values)
    if pa.types.is_date(values.type):
        values = values.cast(pa.timestamp("us"))
    if not pa.types.is_timestamp(values.type):
        raise ValueError("convert it to a timestamp first")
    if values.type.unit == "ns":
        nanoseconds = _filled(values.cast(pa.timestamp("ns")).cast(pa.int64()))
        return np.where(nanoseconds == INT64_NULL, INT64_NULL, nanoseconds // 1000)
    return _filled(values.cast(pa.timestamp("us", tz=values.type.tz)).cast(pa.int64()))


def _bools(values: pa.ChunkedArray) -> Array:
    if pa.types.is_floating(values.type) or pa.types.is_integer(values.type):
        numbers = _ints(values)
        numbers = np.where(numbers == INT64_NULL, -1, numbers)
        if not np.all((numbers >= -1) & (numbers <= 1)):
            raise ValueError("it holds numbers other than 0 and 1")
        return numbers.astype(np.int8)
    if not pa.types.is_boolean(values.type):
        raise ValueError("convert it to true and false first")
    return np.asarray(values.cast(pa.int8()).fill_null(-1).to_numpy())


def _filled(values: pa.ChunkedArray) -> Array:
    return np.asarray(values.fill_null(INT64_NULL).to_numpy())


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


_EXACT_BITS = {16: 11, 32: 24, 64: 53}  # of a float so many bits wide
_CONVERT: Mapping[str, Callable[[pa.ChunkedArray], Array]] = {
    "float": _floats,
    "int": _ints,
    "timestamp": _timestamps,
    "bool": _bools,
}
