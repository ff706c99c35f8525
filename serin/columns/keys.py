"""Finds rows by key: the matching part of a many-to-one join, on columns; and a lookup by one key, in arrays and in the
ONNX graph, where a key that is null or unknown finds nulls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, any_true, array_module, beside, column_from_arrow, kind_of_type

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


_INT64 = 7  # onnx.TensorProto.INT64
Positions = npt.NDArray[np.int64]
_BLOCK = 2**14
_SMALL, _SPARSE = 2**16, 8  # a grid may have this many steps, or this many for each number on it
_FEW = 4  # values are few beside a table with so many times more numbers
_EXACT = 2**52  # differences below this are exact in float64
_DENSE = 2**24  # up to so many combinations of key values, a table is indexed instead of hashed


class KeyIndex:
    """The rows of a table by one or more key columns. A key with a null in it is never found."""

    def __init__(self, keys: Sequence[Column]) -> None:
        self._distinct = [_distinct(key) for key in keys]
        self._grids = [Grid.of(distinct) for distinct in self._distinct]
        self._sorted = [
            Sorted.of(distinct) if grid is None and len(distinct) >= _SMALL else None
            for distinct, grid in zip(self._distinct, self._grids, strict=True)
        ]
        self.keys = tuple(keys)
        codes = self._combined(keys)
        rows = np.flatnonzero(codes >= 0)
        self._rows, self._codes = rows, codes[rows]
        self._dense: npt.NDArray[np.int64] | None = None
        size = math.prod(map(len, self._distinct))
        if size <= _DENSE:
            self._dense = np.full(size + 1, -1, np.int64)  # one more: code -1 finds nothing
            self._dense[self._codes] = rows

    def duplicate(self) -> tuple[int, int] | None:
        """The first row whose key occurs more than once, and how often it does. None when all keys differ."""
        distinct, first, counts = np.unique(self._codes, return_index=True, return_counts=True)
        if len(distinct) == len(self._codes):
            return None
        repeated = np.flatnonzero(counts > 1)
        choice = repeated[np.argmin(first[repeated])]
        return int(self._rows[first[choice]]), int(counts[choice])

    def find(self, keys: Sequence[Column]) -> Positions:
        """For each row of `keys` the position of the row with that key, or -1."""
        codes = self._combined(keys)
        if self._dense is not None:
            return _taken(self._dense, codes)
        place = _places(codes, pa.array(self._codes))
        rows: Positions = beside(np.append(self._rows, -1), place)[place]
        return rows

    def _combined(self, keys: Sequence[Column]) -> Positions:
        codes = [self._codes_of(place, key) for place, key in enumerate(keys)]
        total = codes[0]
        for code, distinct in zip(codes[1:], self._distinct[1:], strict=True):
            code = beside(code, total)
            missing = (total < 0) | (code < 0)
            total = total * len(distinct) + code
            if any_true(missing):
                total[missing] = -1
        return total

    def _codes_of(self, place: int, key: Column) -> Positions:
        grid, ordered = self._grids[place], self._sorted[place]
        if key.xp is np and grid is not None:
            return grid.places(key.values)
        if key.xp is np and ordered is not None and len(key) * _FEW < len(ordered.numbers):
            return ordered.places(key.values)
        return _codes(key, self._distinct[place])


@dataclass(frozen=True, slots=True, eq=False)
class Sorted:
    """Sorted integers. Searching many for a few values takes less time than hashing all of them; a GPU always does."""

    numbers: Positions
    order: Positions

    @classmethod
    def of(cls, distinct: pa.Array) -> Sorted | None:
        if not len(distinct) or not pa.types.is_int64(distinct.type):
            return None
        values = np.asarray(distinct.to_numpy())
        order = np.argsort(values)
        return cls(values[order], order)

    def places(self, values: Any) -> Positions:
        """For each value its place among the numbers, or -1, where the values are."""
        numbers, order = beside(self.numbers, values), beside(self.order, values)
        near = np.minimum(np.searchsorted(numbers, values), len(numbers) - 1)
        return np.where(numbers[near] == values, order[near], np.int64(-1))


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Integers low, low + step, ... with a table of their places; for hours, days, consecutive ids."""

    low: int
    step: int
    table: Positions  # one entry more than there are steps: -1, for what is not among them

    @classmethod
    def of(cls, distinct: pa.Array) -> Grid | None:
        """A grid that holds these numbers, when it has not many more places than there are numbers."""
        if not len(distinct) or not (pa.types.is_int64(distinct.type) or pa.types.is_int8(distinct.type)):
            return None
        values = np.asarray(distinct.to_numpy()).astype(np.int64)
        low, high = int(values.min()), int(values.max())
        if high - low >= _EXACT:
            return None
        step = int(np.gcd.reduce(values - low)) or 1
        width = (high - low) // step + 1
        if width > max(_SMALL, _SPARSE * len(values)):
            return None
        table = np.full(width + 1, -1, np.int64)
        table[(values - low) // step] = np.arange(len(values))
        return cls(low, step, table)

    def places(self, values: npt.NDArray[Any]) -> Positions:
        """For each value its place among the numbers, or -1."""
        found = np.empty(len(values), np.int64)
        outside = len(self.table) - 1
        for start in range(0, len(values), _BLOCK):
            # values below become large or negative: only the right number is on the grid
            offset = values[start : start + _BLOCK].astype(np.int64, copy=False) - self.low
            place = offset if self.step == 1 else np.rint(offset * (1 / self.step)).astype(np.int64)
            known = (place * self.step == offset) & (place.view(np.uint64) < outside)
            place = place if known.all() else np.where(known, place, outside)
            np.take(self.table, place, out=found[start : start + _BLOCK], mode="clip")
        return found


def _distinct(key: Column) -> pa.Array:
    """The values that occur; none of them null."""
    if key.kind == "float":
        raise ValueError("a float cannot be a key")
    if key.dictionary is not None:
        return key.dictionary
    return pc.unique(pa.array(key.values[~key.null]))


def _codes(key: Column, distinct: pa.Array) -> Positions:
    if key.dictionary is None:
        return _places(key.values, distinct)
    table = np.append(_positions(pc.index_in(key.dictionary, value_set=distinct)), -1)
    return _taken(table, key.values)


def _taken(table: Positions, places: Any) -> Positions:
    """The table's entries at these places, where the places are; -1 is the last."""
    here = array_module(places) is np
    found: Positions = np.take(table, places, mode="wrap") if here else beside(table, places)[places]
    return found


def _places(values: Any, distinct: pa.Array) -> Positions:
    """For each value its place among the distinct ones, or -1."""
    xp = array_module(values)
    if xp is np:
        own = pa.array(values)
        return _positions(pc.index_in(own, value_set=distinct.cast(own.type)))
    ordered = Sorted.of(distinct.cast(pa.int64()))
    return xp.full(len(values), -1, np.int64) if ordered is None else ordered.places(values)


def _positions(found: pa.Array) -> Positions:
    return np.asarray(found.fill_null(-1).to_numpy(zero_copy_only=False)).astype(np.int64)


def lookup(table: pa.Table, key: str, keys: Column, columns: Iterable[str]) -> dict[str, Column]:
    """For each of `keys` the row of `table` with that key: its `columns`."""
    found = KeyIndex([_column(table, key)]).find([keys])
    return {name: _column(table, name).take_or_null(found) for name in columns}


def lookup_to_onnx(
    graph: GraphBuilder, table: pa.Table, key: str, key_input: str, columns: Iterable[str]
) -> dict[str, str]:
    """The same in the graph: key_input is the key's rank-1 tensor in wire form, and so are the results."""
    keys = _column(table, key)
    rows = np.flatnonzero(~keys.null)
    known = (
        keys[rows].to_wire().tolist() or [""]
        if keys.kind == "string"
        else keys[rows].to_wire().tolist() or [0]
    )
    if keys.kind == "bool":
        key_input = graph.op("Cast", key_input, to=_INT64)
    # An encoder needs at least one key; without rows, that key maps to the null row like every other one.
    place = label_encoder(graph, key_input, keys=known, places=list(range(len(known))), default=len(rows))
    found = {}
    for name in columns:
        column = _column(table, name).take_or_null(np.append(rows, -1))  # the last row is for unknown keys
        found[name] = graph.op("Gather", graph.constant(column.to_wire(), f"lookup_{name}"), place, axis=0)
    return found


def _column(table: pa.Table, name: str) -> Column:
    values = table.column(name)
    kind = kind_of_type(values.type)
    assert kind is not None, name
    return column_from_arrow(values, kind)


def label_encoder(
    graph: GraphBuilder,
    values: str,
    *,
    keys: Sequence[str] | Sequence[int],
    places: Sequence[int],
    default: int,
) -> str:
    """int64: the place of the key that a value equals, else `default`. At least one key; all of one type."""
    attributes: dict[str, Any] = {
        "keys_strings" if isinstance(keys[0], str) else "keys_int64s": list(keys),
        "values_int64s": list(places),
        "default_int64": default,
    }
    return graph.op("LabelEncoder", values, domain="ai.onnx.ml", **attributes)
