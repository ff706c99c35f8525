"""Groups rows by key, and finds rows of another table as of a time. It works on positions and reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, beside
from serin.columns.hashing import hash_ints, hash_strings

Int64 = npt.NDArray[np.int64]


def joined(parts: Sequence[Column]) -> Column:
    """The columns of pieces as one, where they are; strings with one dictionary."""
    if len(parts) == 1:
        return parts[0]
    texts = None
    if parts[0].dictionary is not None:
        texts = pc.unique(pa.concat_arrays([part.dictionary for part in parts]))
        parts = [with_dictionary(part, texts) for part in parts]
    values = parts[0].xp.concatenate([part.values for part in parts])
    return Column(kind=parts[0].kind, values=values, dictionary=texts)


def with_dictionary(column: Column, texts: pa.Array) -> Column:
    """The same strings as codes into another dictionary, which has all of them."""
    assert column.dictionary is not None
    place = pc.index_in(column.dictionary, value_set=texts).to_numpy(zero_copy_only=False)
    codes = beside(np.append(place, -1).astype(np.int32), column.values)
    return Column(kind="string", values=codes[column.values], dictionary=texts)


def group_codes(keys: Sequence[Column]) -> Int64:
    """Returns the same number for rows with equal keys; a null is a value like any other. Numbers are below the row
    count."""
    codes = keys[0].xp.zeros(len(keys[0]), np.int64)
    for key in keys:
        if key.kind == "float":
            raise ValueError("a float cannot be a key")
        distinct, own = np.unique(key.values, return_inverse=True)
        combined = codes * max(1, len(distinct)) + own
        _, codes = np.unique(combined, return_inverse=True)
    found: Int64 = codes.astype(np.int64, copy=False)
    return found


class Timeline:
    """Rows in order of (group, time, position): answers how many rows of a group lie before a moment, wherever the
    moments are."""

    def __init__(self, groups: Int64, times: Int64) -> None:
        self._moments = np.unique(times)
        self._width = len(self._moments) + 1
        rank = np.searchsorted(self._moments, times)
        places = groups * self._width + rank
        self.order = np.argsort(places, kind="stable")
        self._places = places[self.order]

    def before(self, groups: Int64, times: Int64, *, inclusive: bool = False) -> Int64:
        """For each (group, time) how many rows of the order come before it; `inclusive`: or are at it."""
        side: Literal["left", "right"] = "right" if inclusive else "left"
        rank = np.searchsorted(beside(self._moments, times), times, side=side)
        return np.searchsorted(beside(self._places, times), groups * self._width + rank)

    def starts(self, groups: Int64) -> Int64:
        """Where each group begins in the order."""
        return np.searchsorted(beside(self._places, groups), groups * self._width)


class AsOfIndex:
    """The rows of a table by group and time; finds the newest one that is not newer than a moment. The table is on the
    host, and is copied to the moments."""

    def __init__(self, groups: Int64, times: Int64) -> None:
        self._rows = np.flatnonzero(groups >= 0)
        self._times = times
        self._line = Timeline(groups[self._rows], times[self._rows])

    def find(self, groups: Int64, times: Int64, *, strict: bool, within: int | None) -> Int64:
        """Positions in the table, -1 for none. A group of -1 finds nothing."""
        inside = np.maximum(groups, 0)
        last = self._line.before(inside, times, inclusive=not strict) - 1
        found = last >= self._line.starts(inside)
        found &= groups >= 0
        ordered = beside(np.append(self._rows[self._line.order], -1), times)
        rows: Int64 = ordered[np.where(found, last, -1)]
        if within is not None:
            known = beside(np.append(self._times, 0), times)[rows]
            rows = np.where((rows >= 0) & (times - known <= within), rows, -1)
        return rows


def sampled(rows: Int64, share: float) -> npt.NDArray[np.intp]:
    """Returns the positions of about this share of the sorted rows, by row id alone, so that it does not depend on
    pieces.

    Of so many neighbouring ids one is chosen, by a hash of their position, without reading the others.
    """
    if share >= 1 or not len(rows):
        return beside(np.arange(len(rows)), rows)  # type: ignore[no-any-return]
    step = int(1 / share)
    first, last = int(rows[0]), int(rows[-1])
    blocks = np.arange(first // step, last // step + 1, dtype=np.uint64)
    spread = (blocks * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    wanted = (blocks * np.uint64(step) + spread % np.uint64(step)).astype(np.int64)
    wanted = wanted[(wanted >= first) & (wanted <= last)]
    if last - first == len(rows) - 1:
        return beside(wanted - first, rows)  # type: ignore[no-any-return]
    ids = beside(wanted, rows)
    places = np.searchsorted(rows, ids)
    found: npt.NDArray[np.intp] = places[rows[places] == ids]
    return found


def key_hashes(keys: Sequence[Column]) -> npt.NDArray[np.uint32]:
    """Equal for rows with equal keys, in whatever table or piece they are."""
    mixed = keys[0].xp.zeros(len(keys[0]), np.uint32) if keys else np.zeros(0, np.uint32)
    for key in keys:
        mixed = mixed * np.uint32(31) + group_hashes(key)
    return mixed


def group_hashes(column: Column) -> npt.NDArray[np.uint32]:
    """Equal for equal values, whatever else is in the piece. All nulls are one group."""
    if column.dictionary is not None:
        texts = hash_strings(pa.concat_arrays([column.dictionary, pa.array([""], pa.string())]))
        return beside(texts, column.values)[column.values]  # type: ignore[no-any-return]  # a null's code is -1: the last
    return hash_ints(column.values.astype(np.int64))
