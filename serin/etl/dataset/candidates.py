"""Selects the rows of a piece that may become golden: the best for each reason.

A choice among all pieces' candidates is then a choice among all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.columns.coded import CodedColumn
from serin.columns.column import Column, array_module, beside, on_host, take
from serin.columns.hashing import hash_ints
from serin.features.plan import FeaturePlan
from serin.formats.schema import InputColumn, Kind

MOST_ROWS = 256
_LOW = 4096  # rows with the smallest hashes: most reasons find a row among them
ARROW: Mapping[Kind, pa.DataType] = {
    "string": pa.string(), "float": pa.float32(), "int": pa.int64(), "timestamp": pa.int64(), "bool": pa.int8(),
}  # fmt: skip

Places = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]
Best = list[tuple[float, int]]  # (order, row id), best first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Requests and features side by side; per reason, the best of the rows."""

    table: pa.Table
    reasons: Mapping[str, Best]


def pick_candidates(
    inputs: Sequence[InputColumn],
    plan: FeaturePlan,
    columns: Mapping[str, Column],
    rows: npt.NDArray[np.int64],
    num: npt.NDArray[np.float32],
    cat: npt.NDArray[np.int32],
    target: npt.NDArray[np.float32],
    classes: int,
) -> Candidates:
    """The candidates of one piece's test rows."""
    picker = _Picker(rows)
    reasons: dict[str, Best] = {}
    for column in inputs:
        values = columns[column.name]
        if array_module(rows) is not np:  # and the column perhaps not
            values = Column(kind=values.kind, values=beside(values.values, rows))
        reasons[f"null {column.name}"] = picker.first(partial(_null, values), 2)
        if values.kind != "string":
            reasons[f"least {column.name}"] = picker.extreme(values, 1)
            reasons[f"most {column.name}"] = picker.extreme(values, -1)
    for index, output in enumerate(plan.categorical):
        reasons[f"rare {output.name}"] = picker.first(partial(_equal, cat[:, index], 1), 2)
    for label in range(min(classes, 16)):
        reasons[f"class {label}"] = picker.first(partial(_equal, target, label), 8)
    reasons["any"] = picker.first(partial(_any, target), MOST_ROWS)
    ids = np.asarray(sorted({row for best in reasons.values() for _, row in best}), np.int64)
    places = np.searchsorted(rows, beside(ids, rows))
    own = {name: column.on_host() for name, column in take(columns, places).items()}
    table = rows_in_wire_form(inputs, plan, own, on_host(num[places]), on_host(cat[places]))
    table = table.append_column("target", pa.array(on_host(target[places])))
    return Candidates(table=table.append_column("row", pa.array(ids)), reasons=reasons)


def rows_in_wire_form(
    inputs: Sequence[InputColumn],
    plan: FeaturePlan,
    columns: Mapping[str, Column],
    num: npt.NDArray[np.float32],
    cat: npt.NDArray[np.int32],
) -> pa.Table:
    """Requests and their features: num__<name>, cat__<name>."""
    found = {
        column.name: pa.array(columns[column.name].to_wire(), ARROW[column.kind], from_pandas=False)
        for column in inputs
    }
    found |= {f"num__{name}": pa.array(num[:, index]) for index, name in enumerate(plan.numeric)}
    found |= {f"cat__{output.name}": pa.array(cat[:, index]) for index, output in enumerate(plan.categorical)}
    return pa.table(found)


def _null(column: Column, part: Any) -> Any:
    return column[part].null


def _equal(values: npt.NDArray[Any], wanted: int, part: Any) -> Any:
    return values[part] == wanted


def _any(values: npt.NDArray[Any], part: Any) -> Any:
    return np.ones_like(values[part], dtype=bool)


class _Picker:
    """Chooses rows by a hash of their id, or by a value; ties by place."""

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self._rows = rows
        hashes: Any = hash_ints(rows)
        self._low: Places = _lowest(hashes, _LOW)
        self._order: Floats = hashes.astype(np.float64)

    def first(self, belongs: Callable[[Any], Any], most: int) -> Best:
        """The rows with the smallest hashes of those that belong. `belongs(part)`: which of a part do."""
        chosen = self._low[belongs(self._low)][:most]
        if len(chosen) < most and len(self._low) < len(self._rows):
            all_of_them = np.flatnonzero(belongs(slice(None)))
            chosen = all_of_them[_smallest(self._order[all_of_them], most)]
        return self._listed(chosen, self._order)

    def extreme(self, column: Column, sign: int) -> Best:
        """The row with the least value (sign 1) or the largest (sign -1)."""
        if isinstance(column, CodedColumn):
            return self._extreme_entry(column, sign)
        numbers: Floats = sign * column.values.astype(np.float64)
        null = column.null
        if null.any():
            present = np.flatnonzero(~null)
            return self._listed(present[_smallest(numbers[present], 1)], numbers)
        return self._listed(_smallest(numbers, 1), numbers)

    def _extreme_entry(self, column: CodedColumn, sign: int) -> Best:
        seen, _ = column.places.seen()
        entries = column.of_entries()[seen]
        present = np.flatnonzero(~entries.null)
        if not len(present):
            return []
        numbers = sign * entries.values[present].astype(np.float64)
        wanted = np.zeros(len(column.entries), bool)
        wanted[seen[present[numbers == numbers.min()]]] = True
        place = int(np.argmax(np.take(wanted, column.places.rows)))
        return [(float(numbers.min()), int(self._rows[place]))]

    def _listed(self, places: Any, by: Floats) -> Best:
        return list(zip(on_host(by[places]).tolist(), on_host(self._rows[places]).tolist(), strict=True))


def _lowest(hashes: Any, most: int) -> Places:
    """The places of the lowest hashes, lowest first, ties by place: of those below a limit, where these are enough."""
    if len(hashes) > 2 * most:
        places = np.flatnonzero(hashes < np.uint32(2**32 * 1.25 * most / len(hashes)))
        if len(places) >= most:
            return places[np.argsort(hashes[places], kind="stable")][:most]
    return np.argsort(hashes, kind="stable")[:most]


def _smallest(values: Floats, most: int) -> Places:
    """The places of the smallest values, smallest first, ties by place; without sorting all of them."""
    if array_module(values) is not np:
        if most == 1 and len(values):
            return np.argmin(values).reshape(1)
        return np.argsort(values, kind="stable")[:most]
    if len(values) == 0 or most == 1:
        return np.asarray([np.argmin(values)]) if len(values) else np.empty(0, np.intp)
    places = np.arange(len(values))
    if len(values) > most:
        limit = np.partition(values, most - 1)[most - 1]
        places = np.flatnonzero(values <= limit)
    return places[np.argsort(values[places], kind="stable")][:most]
