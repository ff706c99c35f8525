"""Sums of numbers by the value of a key column, exactly mergeable; in folds of the rows where that is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.features.column import array_module, beside, on_host, tally
from serin.features.murmur3 import hash_ints
from serin.features.number_requests import FIXED_BITS
from serin.features.numbers import Numbers
from serin.features.sample import Sample
from serin.features.steps import Floats
from serin.features.value_counts import group_rows
from serin.formats.schema import Kind

if TYPE_CHECKING:
    from serin.features.graph import GraphBuilder

Counts = npt.NDArray[np.int64]
_BLOCK = 2**20  # so many rows can be added up in float64 without rounding


class Target:
    """The target as numbers, for requests. It is there in training only, so nothing can be served from it."""

    name: ClassVar[str] = "target"
    exact: ClassVar[bool] = True
    inner: ClassVar[None] = None

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {}

    def outputs(self) -> tuple[str, ...]:
        return ("target",)

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        assert sample.target is not None
        return (sample.target,)

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG002
        raise AssertionError("a request holds no target")

    def describe(self) -> str:
        return "the target"

    def to_json(self) -> dict[str, Any]:
        raise AssertionError("the target is no feature")


TARGET = Numbers(column="target", kind="float", encoding=Target())


@dataclass(frozen=True, slots=True, eq=False)
class GroupTable:
    """Per key, the last row for null. `sums`: one per class, or of the value and of three parts of its square."""

    keys: pa.Array
    counts: Counts  # [keys + 1, folds]
    sums: Counts  # [keys + 1, folds, classes or 4]
    ends: Floats  # [keys + 1, 2]: smallest and largest, NaN where there is none

    def squares(self, row: int) -> int:
        high, mixed, low = (int(part) for part in self.sums[row, :, 1:].sum(axis=0))
        return (high << 32) + (mixed << 17) + low


@dataclass(frozen=True, slots=True)
class GroupSums:
    """In units of 2^(exponent - 31), where every finite |value| <= 2^exponent; or rows per class of the target."""

    on_gpu: ClassVar[bool] = True
    key: str
    numbers: Numbers
    exponent: int = 0
    folds: int = 1
    classes: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.key, *self.numbers.columns)

    def measure(self, sample: Sample) -> GroupTable:
        groups, keys = group_rows(sample.columns[self.key])
        values = self.numbers.of(sample)
        xp = array_module(groups, values)  # one of them may be on a GPU and the other not
        groups, values = xp.asarray(groups), xp.asarray(values)
        finite = xp.isfinite(values)
        cells = (groups.astype(np.int64) * self.folds + beside(self._folds(sample), groups))[finite]
        groups, values = groups[finite], values[finite] + np.float32(0)
        size = len(keys) + 1
        counts = _sum(cells, None, size * self.folds).reshape(size, self.folds)
        parts = [values == np.float32(label) for label in range(self.classes)] or self._parts(values)
        sums = [_sum(cells, part, size * self.folds).reshape(size, self.folds) for part in parts]
        ends = np.full((size, 2), np.nan, np.float32) if self.classes else _ends(groups, values, size)
        seen = np.append(np.flatnonzero(counts[:-1].any(axis=1)), len(keys))
        table = np.stack(sums, axis=-1)[seen]
        return GroupTable(keys.take(pa.array(seen[:-1])), counts[seen], table, ends[seen])

    def _folds(self, sample: Sample) -> Any:
        if self.folds == 1:
            return np.zeros(len(sample), np.int64)
        assert sample.rows is not None
        return folds_of(sample.rows, self.folds)

    def _parts(self, values: Any) -> list[Any]:
        """Whole numbers below 2^32, in float64: the value, and the three products of its halves."""
        fixed = np.rint(values.astype(np.float64) * 2.0 ** (FIXED_BITS - self.exponent))
        high = np.floor(fixed * 2.0**-16)
        low = fixed - high * 2.0**16
        return [fixed, high * high, high * low, low * low]

    def merge(self, left: GroupTable, right: GroupTable) -> GroupTable:
        encoded = pa.concat_arrays([left.keys, right.keys]).dictionary_encode()
        places = encoded.indices.to_numpy()
        size = len(encoded.dictionary)
        own, other = np.append(places[: len(left.keys)], size), np.append(places[len(left.keys) :], size)
        counts = np.zeros((size + 1, self.folds), np.int64)
        sums = np.zeros((size + 1, *left.sums.shape[1:]), np.int64)
        ends = np.full((size + 1, 2), np.nan, np.float32)
        for table, rows in ((left, own), (right, other)):  # a key stands once in each
            counts[rows] += table.counts
            sums[rows] += table.sums
            ends[rows, 0] = np.fmin(ends[rows, 0], table.ends[:, 0])
            ends[rows, 1] = np.fmax(ends[rows, 1], table.ends[:, 1])
        return GroupTable(encoded.dictionary, counts, sums, ends)


def folds_of(rows: npt.NDArray[np.int64], folds: int) -> npt.NDArray[np.int64]:
    """The fold of each row, by a hash of its id."""
    return (hash_ints(rows) % np.uint32(folds)).astype(np.int64)


def _sum(cells: Any, weights: Any, size: int) -> Counts:
    """The weights of each cell, added up without rounding; None: how many there are."""
    xp = array_module(cells)
    total = xp.zeros(size, np.int64)
    for start in range(0, len(cells), _BLOCK):
        part = slice(start, start + _BLOCK)
        own = None if weights is None else weights[part].astype(np.float64)
        total += tally(cells[part], size, own).astype(np.int64)
    return on_host(total)


def _ends(groups: Any, values: Any, size: int) -> Floats:
    """The smallest and the largest value of each group, by sorting (group, value) as one whole number."""
    ends = np.full((size, 2), np.nan, np.float32)
    if not len(values):
        return ends
    xp = array_module(groups, values)
    bits = xp.ascontiguousarray(values).view(np.uint32)
    keys = xp.where(bits >> np.uint32(31) != 0, ~bits, bits | np.uint32(0x80000000)).astype(np.uint64)
    ordered = xp.sort((groups.astype(np.uint64) << np.uint64(32)) | keys)
    starts = xp.searchsorted(ordered, xp.asarray(np.arange(size + 1, dtype=np.uint64) << np.uint64(32)))
    low, high = ordered[xp.minimum(starts[:-1], len(ordered) - 1)], ordered[xp.maximum(starts[1:] - 1, 0)]
    starts, low, high = (on_host(each) for each in (starts, low, high))
    seen = starts[1:] > starts[:-1]
    ends[seen] = np.stack([_values(low[seen]), _values(high[seen])], axis=1)
    return ends


def _values(keys: npt.NDArray[np.uint64]) -> Floats:
    own = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    bits = np.where(own & np.uint32(0x80000000) != 0, own ^ np.uint32(0x80000000), ~own)
    return bits.astype(np.uint32).view(np.float32)
