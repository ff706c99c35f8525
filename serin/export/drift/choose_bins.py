"""Chooses the bins of a column from its training values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.bins import as_texts, bin_codes, element_of, encode_hashes, number_values
from serin.columns.column import Array, kind_of_type
from serin.formats.drift import BinKind, BinnedColumn

_NUMBER_BINS = 20
_CATEGORIES = 50  # also: integers with at most so many values are categories
_MOST_KNOWN = 100_000  # distinct values that are remembered, four bytes each


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A column to be watched: its name for people, its name in captured rows, and the place in a list."""

    name: str
    field: str
    source: Literal["request", "score"]
    element: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binned:
    """A column with the bin of each training row. `fresh`: rows whose value had never occurred when they came count as
    unseen, in the second half of the period."""

    column: BinnedColumn
    codes: Array
    fresh: bool = False


def bin_column(source: Source, table: pa.Table, period: Array) -> Binned:
    """Chooses bins for a column and finds the bin of each row. `period`: rising numbers of weeks (or parts) in the
    order of time, one per row: a value is new in the period in which it first occurs."""
    values = element_of(table.column(source.field), source.element)
    kind = _kind(values)
    column = BinnedColumn(
        name=source.name,
        field=source.field,
        source=source.source,
        element=source.element,
        kind=kind,
        edges=_edges(values) if kind == "number" else (),
    )
    if kind == "category":
        return _categories(column, values, period)
    codes = bin_codes(column, table)
    assert codes is not None
    return Binned(column=column, codes=codes)


def _kind(values: pa.ChunkedArray) -> BinKind:
    kind = kind_of_type(values.type)
    if kind == "int":
        return "category" if len(values.unique()) <= _CATEGORIES else "number"
    if kind == "float":
        return "number"
    return "timestamp" if kind == "timestamp" else "category"


def _edges(values: pa.ChunkedArray) -> tuple[float, ...]:
    """Quantiles of the finite values, each once; 0 for a column without any."""
    numbers = number_values(values)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return (0.0,)
    levels = np.linspace(0, 1, _NUMBER_BINS + 1)
    return tuple(float(edge) for edge in np.unique(np.quantile(finite, levels, method="nearest")))


def _categories(column: BinnedColumn, values: pa.ChunkedArray, period: Array) -> Binned:
    coded = as_texts(values)
    assert coded.dictionary is not None
    texts, present = coded.dictionary, coded.values >= 0
    counts = np.bincount(coded.values[present], minlength=len(texts))
    table = pa.table({"count": counts, "text": texts})
    order = pc.sort_indices(table, [("count", "descending"), ("text", "ascending")]).to_numpy()
    top, rest = order[:_CATEGORIES], order[_CATEGORIES:]
    column = replace(
        column,
        categories=tuple(texts.take(pa.array(top)).to_pylist()),
        known=encode_hashes(texts.take(pa.array(rest))) if len(rest) <= _MOST_KNOWN else None,
    )
    places = np.full(len(texts) + 1, len(top), np.int64)
    places[top] = np.arange(len(top))
    places[-1] = len(top) + 2
    codes = places[coded.values]
    if len(rest) and column.known is not None:
        codes = np.where(_is_fresh(coded.values, present, period, len(texts)), len(top) + 1, codes)
    return Binned(column=column, codes=codes, fresh=bool(len(rest)) and column.known is not None)


def _is_fresh(values: Array, present: Array, period: Array, size: int) -> Array:
    """Rows of the second half of the periods whose value first occurs in the row's own period."""
    first = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(first, values[present], period[present])
    late = period > (int(period.max(initial=0)) - 1) // 2
    fresh = np.zeros(len(values), bool)
    fresh[present] = first[values[present]] == period[present]
    return fresh & late
