"""Computes features a block of rows at a time, on the host; what depends on one value is computed once per distinct
value.

A block stays in the processor's cache from the first column to the last, and on its way to disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.columns.coded import CodedColumn
from serin.columns.column import Column
from serin.features.codes import CategoricalFeature
from serin.features.fit import NumericFeature
from serin.features.numbers import Made, Numbers, through
from serin.features.own import OwnCodes
from serin.features.sample import Sample

BLOCK_ROWS = 2**14

Num = npt.NDArray[np.float32]
Cat = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class _Looked:
    """A feature that is looked up in a table: `places` has each row's entry; -1 is the last."""

    table: npt.NDArray[Any]
    places: npt.NDArray[Any]

    def __call__(self, rows: slice) -> npt.NDArray[Any]:
        return np.take(self.table, self.places[rows], mode="wrap")


@dataclass(frozen=True, slots=True, eq=False)
class _Stepped:
    """A number through its steps, block by block."""

    numbers: Numbers
    column: Column

    def __call__(self, rows: slice) -> npt.NDArray[Any]:
        return _without_null(through(self.numbers.steps, self.column[rows].floats()))


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """A feature that was made of all rows at once."""

    values: npt.NDArray[Any]

    def __call__(self, rows: slice) -> npt.NDArray[Any]:
        return self.values[rows]


_Source = _Looked | _Stepped | _Whole


class BlockTransform:
    """The features of these columns. `fold_ids`: of the rows that train; they come first."""

    def __init__(
        self,
        numbers: Sequence[NumericFeature],
        categories: Sequence[CategoricalFeature],
        columns: Mapping[str, Column],
        fold_ids: npt.NDArray[np.int64] | None = None,
    ) -> None:
        training = 0 if fold_ids is None else len(fold_ids)
        self._sample = Sample(columns=columns, fold_ids=fold_ids, training=training)
        self._made: Made = {}
        self._numbers = [self._number(feature.numbers) for feature in numbers]
        self._codes = [source for feature in categories for source in self._codes_of(feature)]

    def fill(self, start: int, num: Num, cat: Cat) -> None:
        """Fills the two arrays with the features of the rows from `start` on."""
        for begin in range(0, len(num), BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, len(num))
            rows = slice(start + begin, start + end)
            for made, sources in ((num, self._numbers), (cat, self._codes)):
                for index, source in enumerate(sources):
                    made[begin:end, index] = source(rows)

    def _number(self, numbers: Numbers) -> _Source:
        if numbers.encoding is not None:
            blocks = list(numbers.blocks(self._sample, max(len(self._sample), 1), self._made))
            return _Whole(_without_null(blocks[0]) if blocks else np.empty(0, np.float32))
        column = self._sample.columns[numbers.column]
        if isinstance(column, CodedColumn):
            table = through(numbers.steps, column.of_entries().floats())
            return _Looked(_without_null(table), column.places.rows)
        return _Stepped(numbers, column)

    def _codes_of(self, feature: CategoricalFeature) -> Iterator[_Source]:
        column = self._sample.columns[feature.column]
        own = isinstance(feature.step, OwnCodes)  # it may read more than the value
        entries = None if own or _encoded(feature.numbers) else _entries(column)
        if entries is None:
            yield from map(_Whole, feature.transform(self._sample))
            return
        table, places = entries
        few = Sample(columns={feature.column: table})
        for codes in feature.transform(few):
            yield _Looked(codes, places)


def _encoded(numbers: Numbers | None) -> bool:
    return numbers is not None and numbers.encoding is not None


def _entries(column: Column) -> tuple[Column, npt.NDArray[Any]] | None:
    """The column's table and the rows' places in it, when it has one."""
    if isinstance(column, CodedColumn):
        return column.of_entries(), column.places.rows
    if column.dictionary is None:
        return None
    codes = np.append(np.arange(len(column.dictionary), dtype=np.int32), np.int32(-1))
    return Column(kind=column.kind, values=codes, dictionary=column.dictionary), column.values


def _without_null(values: Num) -> Num:
    """A number that is still null after its steps becomes 0: a network never sees NaN."""
    null = np.isnan(values)
    return np.where(null, np.float32(0), values) if null.any() else values
