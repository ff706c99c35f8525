"""A column as arrays, which fit and transform use instead of data frames.

A null is a reserved value, the same one as on the wire: NaN, the smallest int64, -1 for a bool, and code -1 for a
string. Strings are codes into a dictionary, so that work on strings is done once per distinct value, never per row.

`values` may be on a GPU (cupy). Work that is done per row makes new arrays through `array_module(values)` and copies
its small tables there with `xp.asarray`; dictionaries, and all work per distinct value, stay on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.nulls import is_null, is_null_string, null_of, parse_times
from serin.formats.schema import INT64_NULL, Kind

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """`values`: float32, int64 (int, timestamp in microseconds UTC), int8 (bool) or int32 codes into `dictionary`."""

    kind: Kind
    values: Array
    dictionary: pa.Array | None = None  # of strings, all different, none null or empty

    def __len__(self) -> int:
        return len(self.values)

    @property
    def null(self) -> npt.NDArray[np.bool_]:
        return is_null(self.kind, self.values)

    def null_count(self, rows: Array | None = None) -> int:
        """How many of these rows are null; without `rows`, how many of all."""
        some = self if rows is None else self[beside(rows, self.values)]
        if self.kind != "float" and (not len(some) or int(some.values.min()) != null_of(self.kind)):
            return 0  # a null is the smallest of all
        return count_true(some.null)

    @property
    def xp(self) -> Any:
        """The module that makes arrays where the values are: numpy or cupy."""
        return array_module(self.values)

    def on_host(self) -> Column:
        """The column with its values in this machine's memory; itself when they are there."""
        if array_module(self.values) is np:
            return self
        return Column(kind=self.kind, values=on_host(self.values), dictionary=self.dictionary)

    def blocks(self, rows: int) -> Iterator[Column]:
        """The column in blocks of so many rows, the last one shorter: views, small enough for a processor's cache."""
        for start in range(0, len(self.values), rows):
            yield self[start : start + rows]

    def __getitem__(self, rows: slice | Array) -> Column:
        """Some of the rows, by slice, mask or positions."""
        return Column(kind=self.kind, values=self.values[rows], dictionary=self.dictionary)

    def taken(self, rows: Array, done: dict[int, Any]) -> Column:
        """Returns the rows at these positions. `done`: results that columns with the same places already have."""
        del done
        if self.xp is not np:
            return self[rows]
        return Column(kind=self.kind, values=np.take(self.values, rows), dictionary=self.dictionary)

    def take_or_null(self, rows: npt.NDArray[np.integer[Any]]) -> Column:
        """The rows at these positions; -1 gives a null."""
        xp = array_module(self.values)
        extended = xp.append(self.values, xp.asarray([null_of(self.kind)], dtype=self.values.dtype))
        return Column(kind=self.kind, values=beside(extended, rows)[rows], dictionary=self.dictionary)

    def with_few_texts(self) -> Column:
        """The same column, on the host. Where its dictionary is longer than the column, without unused texts."""
        if self.dictionary is None or len(self.dictionary) <= len(self):
            return self
        used, codes = np.unique(self.values, return_inverse=True)
        nulls = int((used < 0).sum())
        texts = self.dictionary.take(pa.array(used[nulls:], pa.int64()))
        return Column(kind=self.kind, values=(codes - nulls).astype(np.int32), dictionary=texts)

    def floats(self) -> npt.NDArray[np.float32]:
        """Numbers as float32 with NaN for null. A string or a time has no such form (ValueError)."""
        if self.kind == "float":
            return self.values
        if self.kind not in ("int", "bool"):
            raise ValueError(f"a {self.kind} is not a number")
        numbers = self.values.astype(np.float32)
        null = self.null
        if any_true(null):
            numbers[null] = np.nan
        return numbers

    def to_wire(self) -> Array:
        """One value per row as it travels in a request; strings as an object array, "" for null."""
        if self.kind != "string":
            return self.values
        few = self.with_few_texts()
        assert few.dictionary is not None
        texts = np.asarray([*few.dictionary.to_pylist(), ""], dtype=object)
        return texts[few.values]

    def to_arrow(self) -> pa.Array:
        """Returns the column as an Arrow array with true nulls."""
        if self.kind == "string":
            assert self.dictionary is not None
            return pa.DictionaryArray.from_arrays(pa.array(self.values, mask=self.null), self.dictionary)
        if self.kind == "bool":
            return pa.array(self.values == 1, mask=self.null)
        plain = pa.array(self.values, mask=self.null)
        return plain.cast(pa.timestamp("us", tz="UTC")) if self.kind == "timestamp" else plain


def array_module(*arrays: Any) -> Any:
    """The module that makes arrays where these are: cupy when one of them is on a GPU, else numpy."""
    for values in arrays:
        if not isinstance(values, np.ndarray):
            return sys.modules[type(values).__module__.partition(".")[0]]
    return np


def on_host(array: Any) -> Array:
    """The array in this machine's memory."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


def beside(array: Any, other: Any) -> Any:
    """The array on the device of the other one."""
    xp = array_module(other)
    return on_host(array) if xp is np else xp.asarray(array)


def count_true(mask: Any) -> int:
    """How many are true. A GPU sums integers at once, but would compile a kernel to sum booleans."""
    return int(np.count_nonzero(mask) if isinstance(mask, np.ndarray) else mask.astype(np.int64).sum())


def any_true(mask: Any) -> bool:
    return bool(mask.any()) if isinstance(mask, np.ndarray) else count_true(mask) > 0


def tally(codes: Any, size: int, weights: Any = None) -> Any:
    """The number of each code (0 .. size - 1), or the sum of its weights, on the device of the codes."""
    xp = array_module(codes)
    if xp is np:
        return np.bincount(codes, weights, minlength=size)
    counts = xp.zeros(size, np.uint64 if weights is None else np.float64)
    xp.add.at(counts, codes.astype(np.int64, copy=False), np.uint64(1) if weights is None else weights)
    return counts if weights is not None else counts.view(np.int64)


def take(columns: Mapping[str, Column], rows: Array) -> dict[str, Column]:
    """The same rows of every column, by mask or positions; these go to each device once."""
    if rows.dtype == bool:
        rows = np.flatnonzero(rows)  # a mask would be counted again for every column
    places: dict[Any, Any] = {}
    done: dict[int, Any] = {}
    for column in columns.values():
        if column.xp not in places:
            places[column.xp] = on_host(rows) if column.xp is np else column.xp.asarray(rows)
    return {name: column.taken(places[column.xp], done) for name, column in columns.items()}


def kind_of_type(arrow: pa.DataType) -> Kind | None:
    """The kind of a column of this Arrow type; None when no feature can be made of it."""
    if pa.types.is_dictionary(arrow):
        return kind_of_type(arrow.value_type)
    if pa.types.is_boolean(arrow):
        return "bool"
    if pa.types.is_integer(arrow):
        return "int"
    if pa.types.is_floating(arrow) or pa.types.is_decimal(arrow) or pa.types.is_null(arrow):
        return "float"
    if pa.types.is_timestamp(arrow) or pa.types.is_date(arrow):
        return "timestamp"
    if pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return "string"
    return None


def column_from_arrow(values: pa.ChunkedArray | pa.Array, kind: Kind) -> Column:
    """The column; pa.ArrowInvalid when a value does not fit the kind (such as text that is not a time)."""
    chunked = values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])
    if kind == "string":
        return _strings(chunked)
    if pa.types.is_dictionary(chunked.type):
        if kind == "timestamp":
            return _times_per_entry(chunked)
        chunked = chunked.cast(chunked.type.value_type)
    return Column(kind=kind, values=_CONVERT[kind](chunked))


def column_from_wire(values: Array, kind: Kind) -> Column:
    """The column behind an array in wire form (rank 1)."""
    if kind == "string":
        return column_from_arrow(pa.array(values, type=pa.string()), "string")
    return Column(kind=kind, values=values)


def _strings(values: pa.ChunkedArray) -> Column:
    encoded = values if pa.types.is_dictionary(values.type) else values.cast(pa.string()).dictionary_encode()
    if encoded.num_chunks != 1:
        encoded = encoded.unify_dictionaries()
    indices = (
        pa.chunked_array([chunk.indices for chunk in encoded.chunks], pa.int32())
        if encoded.num_chunks
        else None
    )
    dictionary = encoded.chunk(0).dictionary if encoded.num_chunks else pa.array([], pa.string())
    codes = (
        _filled(indices, -1).astype(np.int32, copy=False) if indices is not None else np.empty(0, np.int32)
    )
    return _canonical(codes, dictionary.cast(pa.string()))


def _canonical(codes: npt.NDArray[np.int32], dictionary: pa.Array) -> Column:
    """The column without dictionary entries that mean null, and with each string once."""
    distinct = pc.unique(dictionary)
    if len(distinct) == len(dictionary) and not _any_void(dictionary):
        return Column(kind="string", values=codes, dictionary=dictionary)
    kept = distinct.filter(pc.and_(pc.is_valid(distinct), pc.invert(is_null_string(distinct))))
    place = np.append(_filled(pc.index_in(dictionary, value_set=kept), -1), -1).astype(np.int32)
    return Column(kind="string", values=place[codes], dictionary=kept)


def _any_void(texts: pa.Array) -> bool:
    """Whether one of them is null or empty: two strings that begin at the same byte."""
    if texts.null_count or not len(texts):
        return bool(texts.null_count)
    begins = np.frombuffer(texts.buffers()[1], np.int32, len(texts) + 1, 4 * texts.offset)
    return bool((begins[1:] == begins[:-1]).any())


def _times_per_entry(values: pa.ChunkedArray) -> Column:
    texts = _strings(values) if pa.types.is_string(values.type.value_type) else None
    if texts is None:
        return Column(kind="timestamp", values=_times(values.cast(values.type.value_type)))
    assert texts.dictionary is not None
    entries = _times(pa.chunked_array([texts.dictionary]))
    return Column(kind="timestamp", values=np.append(entries, INT64_NULL)[texts.values])


def _floats(values: pa.ChunkedArray) -> Array:
    if not pa.types.is_floating(values.type):
        values = values.cast(pa.float64(), safe=False)
    numbers = _one_chunk(values).to_numpy(zero_copy_only=False)
    with np.errstate(
        over="ignore"
    ):  # values out of float32's range become infinite, in training as in serving
        return np.asarray(numbers.astype(np.float32, copy=False))


def _times(values: pa.ChunkedArray) -> Array:
    if kind_of_type(values.type) == "string":
        values = parse_times(values.cast(pa.string()))
    if pa.types.is_timestamp(values.type) and values.type.unit == "ns":
        nanoseconds = _filled(values.cast(pa.int64()), INT64_NULL)
        return np.where(nanoseconds == INT64_NULL, INT64_NULL, nanoseconds // 1000)
    zone = values.type.tz if pa.types.is_timestamp(values.type) else None
    return _filled(values.cast(pa.timestamp("us", tz=zone)).cast(pa.int64()), INT64_NULL)


def _one_chunk(values: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Returns the values without a copy where they are already contiguous."""
    if values.num_chunks == 1:
        return values.chunk(0)
    return values.combine_chunks() if values.num_chunks else pa.array([], values.type)


def _filled(values: pa.ChunkedArray | pa.Array, null: int) -> Array:
    filled = values.fill_null(null) if values.null_count else values
    if isinstance(filled, pa.ChunkedArray):
        filled = _one_chunk(filled)
        if isinstance(
            filled, pa.ChunkedArray
        ):  # combine_chunks may give back several when one would overflow
            return np.concatenate([chunk.to_numpy() for chunk in filled.chunks])
    return np.asarray(filled.to_numpy(zero_copy_only=False))


_CONVERT: Mapping[str, Callable[[pa.ChunkedArray], Array]] = {
    "float": _floats,
    "int": lambda values: _filled(values.cast(pa.int64()), INT64_NULL),
    "timestamp": _times,
    "bool": lambda values: _filled(values.cast(pa.bool_()).cast(pa.int8()), -1),
}
