"""Counts how many rows of an Arrow table fall into each bin of drift.json. Export and the live watch share it.

Tables have natural types and true nulls. NaN and "" count as null, as everywhere.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Array, Column, column_from_arrow, kind_of_type
from serin.columns.hashing import hash_strings
from serin.formats.drift import BLOCK_S, SHORTEST, BinnedColumn, DriftStatistics

_STEP_S = int(BLOCK_S[SHORTEST])
_HOUR_US = 3_600_000_000
_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCounts:
    """`starts`: of each ten seconds that have rows, rising (seconds since 1970). `counts`: int64[starts, bins],
    the bins of all series one after the other. A row is in exactly one bin of a series, or in none when it is not in
    the series' segment or the table lacks the column."""

    starts: Array
    counts: Array


def count_rows(statistics: DriftStatistics, table: pa.Table, times: Array) -> RowCounts:
    """The rows of each ten seconds in each bin of all series. `times`: seconds since 1970, one per row."""
    starts, place = np.unique(
        np.floor(np.asarray(times) / _STEP_S).astype(np.int64) * _STEP_S, return_inverse=True
    )
    codes = [bin_codes(column, table) for column in statistics.columns]
    counts = [
        _count(statistics, index, codes, place.reshape(-1), len(starts))
        for index in range(len(statistics.series))
    ]
    return RowCounts(starts=starts, counts=np.concatenate(counts, axis=1))


def _count(
    statistics: DriftStatistics, index: int, codes: list[Array | None], place: Array, groups: int
) -> Array:
    """The counts of one series, int64[groups, bins]."""
    series = statistics.series[index]
    bins = statistics.columns[series.column].bins
    own = codes[series.column]
    if own is None:
        return np.zeros((groups, bins), np.int64)
    if series.segment is not None:
        segments = codes[series.segment.column]
        if segments is None:
            return np.zeros((groups, bins), np.int64)
        inside = segments == series.segment.category
        own, place = own[inside], place[inside]
    return np.bincount(place * bins + own, minlength=groups * bins).reshape(groups, bins)


def bin_codes(column: BinnedColumn, table: pa.Table) -> Array | None:
    """The bin of each row; None when the table does not have the column."""
    if column.field not in table.column_names:
        return None
    values = element_of(table.column(column.field), column.element)
    if column.kind == "number":
        return _number_codes(column, values)
    return _hour_codes(values) if column.kind == "timestamp" else _category_codes(column, values)


def element_of(values: pa.ChunkedArray, element: int | None) -> pa.ChunkedArray:
    """One place of a column of lists; the column itself when it has none."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if element is None or not any(is_list(values.type) for is_list in lists):
        return values
    return pc.list_element(values, element)


def _number_codes(column: BinnedColumn, values: pa.ChunkedArray) -> Array:
    """Inner bins are closed below and open above, but for the last, which holds the largest training value."""
    numbers = number_values(values)
    edges = np.asarray(column.edges)
    inner = max(len(edges) - 1, 1)
    codes = np.minimum(np.searchsorted(edges, numbers, side="right") - 1, inner - 1)
    codes[numbers < edges[0]] = inner
    codes[numbers > edges[-1]] = inner + 1
    codes[np.isnan(numbers)] = inner + 2
    return codes


def number_values(values: pa.ChunkedArray) -> Array:
    """The numbers as float64 with NaN for null; a column of another kind is all null."""
    kind = kind_of_type(values.type)
    if kind == "int":
        wide = values.cast(pa.float64(), safe=False)
        return np.asarray(wide.to_numpy(zero_copy_only=False), dtype=np.float64)
    if kind == "bool":
        values = values.cast(pa.int8())
    elif kind != "float":
        return np.full(len(values), np.nan)
    return np.asarray(column_from_arrow(values, "float").values, dtype=np.float64)


def _hour_codes(values: pa.ChunkedArray) -> Array:
    column = column_from_arrow(values, "timestamp")
    codes = column.values // _HOUR_US % 24
    return np.where(column.null, 24, codes)


def _category_codes(column: BinnedColumn, values: pa.ChunkedArray) -> Array:
    coded = as_texts(values)
    assert coded.dictionary is not None
    known = np.append(category_places(column, coded.dictionary), len(column.categories) + 2)
    return known[coded.values]


def as_texts(values: pa.ChunkedArray) -> Column:
    """A column of strings, integers or booleans as coded strings."""
    kind = kind_of_type(values.type)
    if kind in ("int", "bool"):
        values = values.cast(pa.string())
    elif kind == "float":  # a frame turns integers into floats as soon as one is missing
        values = pa.chunked_array([_whole_numbers(values)])
    return column_from_arrow(values.cast(pa.string()) if kind == "timestamp" else values, "string")


def _whole_numbers(values: pa.ChunkedArray) -> pa.Array:
    numbers = number_values(values)
    whole = np.isfinite(numbers) & (np.trunc(numbers) == numbers) & (np.abs(numbers) < 2.0**53)
    integers = pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(pa.string())
    others = pa.array([repr(number) for number in numbers[~whole].tolist()], pa.string())
    texts = pc.replace_with_mask(integers, pa.array(~whole), others)
    return pc.if_else(pa.array(np.isnan(numbers)), pa.scalar(None, pa.string()), texts)


def category_places(column: BinnedColumn, texts: pa.Array) -> Array:
    """The bin of each distinct text."""
    size = len(column.categories)
    found = pc.index_in(texts, value_set=pa.array(column.categories, pa.string()))
    places = np.asarray(found.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)
    rest = np.full(len(texts), size, np.int64)
    if column.known is not None:
        hashes = np.frombuffer(base64.b64decode(column.known), "<u4")
        rest[~np.isin(hash_strings(texts), hashes)] = size + 1
    return np.where(places < 0, rest, places)


def unseen_values(column: BinnedColumn, table: pa.Table, most: int) -> tuple[str, ...]:
    """Some of the values that are in the bin of values that training never had, each cut to 40 letters."""
    coded = as_texts(element_of(table.column(column.field), column.element))
    assert coded.dictionary is not None
    places = category_places(column, coded.dictionary)
    used = np.unique(coded.values[coded.values >= 0])[::-1]
    new = used[places[used] == len(column.categories) + 1][:most]
    return tuple(str(text)[:40] for text in coded.dictionary.take(pa.array(new)).to_pylist())


def encode_hashes(texts: pa.Array) -> str:
    """The value of `BinnedColumn.known` for these texts."""
    return base64.b64encode(np.unique(hash_strings(texts)).astype("<u4").tobytes()).decode()


def table_times(table: pa.Table, field: str) -> Array:
    """A timestamp column as seconds since 1970."""
    return np.asarray(column_from_arrow(table.column(field), "timestamp").values / _US)


def renamed(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """The table with some columns under other names, such as a request column that captures had to rename."""
    return table.rename_columns([names.get(name, name) for name in table.column_names])
