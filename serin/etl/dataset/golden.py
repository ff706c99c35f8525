"""Golden rows: a few hundred requests with their expected features, chosen for what tends to go wrong.

Most are rows of the test split: nulls, unseen values, extremes, every class, then others by a hash of the row id. Some
are such rows with one value removed or replaced by an unseen one. Their features are computed as in serving, from the
request through the lookups; for a real row the result must equal the ETL's.

Each piece gives its candidates, the best rows for each reason: a choice among all pieces' candidates is then a choice
among all rows.
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
from serin.columns.column import (
    Column,
    any_true,
    array_module,
    beside,
    column_from_arrow,
    column_from_wire,
    on_host,
    take,
)
from serin.columns.derived import derive, typed
from serin.columns.exact import alike
from serin.columns.hashing import hash_ints
from serin.columns.keys import lookup
from serin.features.plan import FeaturePlan
from serin.formats.dataset import DerivedDescription, LookupDescription
from serin.formats.nulls import null_of
from serin.formats.schema import InputColumn, Kind

MOST_ROWS = 256
_LOW = 4096  # rows with the smallest hashes: most reasons find a row among them
ARROW: Mapping[Kind, pa.DataType] = {
    "string": pa.string(), "float": pa.float32(), "int": pa.int64(), "timestamp": pa.int64(), "bool": pa.int8(),
}  # fmt: skip
_CHANGED_ROWS = 64
_UNSEEN_TEXT, _UNSEEN_INT = "serin-unseen-välue-鳥", 9_007_199_254_740_993

Places = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]
Best = list[tuple[float, int]]  # (order, row id), best first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Made:
    """What the model computes from a request before its features: columns from lookup tables, then from expressions."""

    lookups: Sequence[tuple[LookupDescription, pa.Table]]
    derived: Sequence[DerivedDescription] = ()


def choose_golden(
    inputs: Sequence[InputColumn],
    plan: FeaturePlan,
    made: Made,
    candidates: Sequence[Candidates],
) -> pa.Table:
    """The golden table: request columns in wire form, num__<name>, cat__<name>, target, row."""
    reasons: dict[str, list[tuple[float, int]]] = {}
    for part in candidates:
        for reason, best in part.reasons.items():
            reasons.setdefault(reason, []).extend(best)
    most = MOST_ROWS - min(_CHANGED_ROWS, 1 + 2 * len(inputs))
    limits = {"null": 2, "least": 1, "most": 1, "rare": 2, "class": 8, "any": most}
    chosen: dict[int, None] = {}
    for reason, found in reasons.items():
        for _, row in sorted(found)[: limits[reason.split()[0]]]:
            if len(chosen) < most:
                chosen[row] = None
    table = pa.concat_tables([part.table for part in candidates])
    ids = table.column("row").to_numpy()
    places = np.flatnonzero(np.isin(ids, np.fromiter(chosen, np.int64, len(chosen))))
    real = table.take(pa.array(places[np.argsort(ids[places])]))
    copies, changed = _changed(inputs, real)
    requests = pa.concat_tables([real.select(changed.column_names), changed])
    columns, num, cat = features_of_requests(inputs, plan, made, requests)
    _assert_served_alike(plan, real, num, cat)
    made_of_changed = rows_in_wire_form(inputs, plan, columns, num, cat).slice(real.num_rows)
    for name in ("target", "row"):
        made_of_changed = made_of_changed.append_column(name, copies.column(name))
    return pa.concat_tables([real, made_of_changed]).combine_chunks()


def features_of_requests(
    inputs: Sequence[InputColumn],
    plan: FeaturePlan,
    made: Made,
    requests: pa.Table,
) -> tuple[dict[str, Column], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Returns what serving computes from requests in wire form: the columns after lookups and expressions, and the
    features."""
    columns: dict[str, Column] = {}
    for column in inputs:
        values = requests.column(column.name)
        if column.kind == "string":
            columns[column.name] = column_from_arrow(values, "string")
        else:
            columns[column.name] = column_from_wire(values.to_numpy(), column.kind)
    for description, table in made.lookups:
        columns |= lookup(table, description.key, columns[description.key], description.columns)
    for each in made.derived:
        columns[each.name] = derive(typed(each.expression, each.kinds), columns, requests.num_rows)
    return columns, *plan.transform(columns)


def _changed(inputs: Sequence[InputColumn], real: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Some of the real rows, and requests like theirs, each with one value null, one value unseen, or every value
    null."""
    nulls = {column.name: "" if column.kind == "string" else null_of(column.kind) for column in inputs}
    changes = [nulls] + [{name: value} for name, value in nulls.items()]
    unseen: dict[Kind, str | int] = {"string": _UNSEEN_TEXT, "int": _UNSEEN_INT}
    changes += [{column.name: unseen[column.kind]} for column in inputs if column.kind in unseen]
    changes = changes[:_CHANGED_ROWS]
    copies = real.take(pa.array([index % real.num_rows for index in range(len(changes))]))
    requests = {}
    for column in inputs:
        values = copies.column(column.name).to_pylist()
        changed = [change.get(column.name, value) for change, value in zip(changes, values, strict=True)]
        requests[column.name] = pa.array(changed, ARROW[column.kind], from_pandas=False)
    return copies, pa.table(requests)


def _assert_served_alike(
    plan: FeaturePlan, real: pa.Table, num: npt.NDArray[np.float32], cat: npt.NDArray[np.int32]
) -> None:
    """`num` and `cat` begin with what serving computes for the real rows."""
    approximate, rows = plan.approximate, real.num_rows
    for index, name in enumerate(plan.numeric):
        wanted = real.column(f"num__{name}").to_numpy()
        found = np.ascontiguousarray(num[:rows, index])
        if name in approximate:
            same = alike(found, wanted, approximate[name])
        else:
            same = found.view(np.int32) == wanted.view(np.int32)
        assert same.all(), f"{name}: served otherwise"
    for index, output in enumerate(plan.categorical):
        wanted = real.column(f"cat__{output.name}").to_numpy()
        assert np.array_equal(cat[:rows, index], wanted), f"{output.name}: served otherwise"


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
        reasons[f"null {column.name}"] = picker.first(partial(_is_null, values), 2)
        if values.kind != "string":
            reasons[f"least {column.name}"] = picker.extreme(values, 1)
            reasons[f"most {column.name}"] = picker.extreme(values, -1)
    for index, output in enumerate(plan.categorical):
        reasons[f"rare {output.name}"] = picker.first(partial(_equal, cat[:, index], 1), 2)
    for label in range(min(classes, 16)):
        reasons[f"class {label}"] = picker.first(partial(_equal, target, label), 8)
    reasons["any"] = picker.first(lambda part: np.ones_like(target[part], dtype=bool), MOST_ROWS)
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


def _is_null(column: Column, part: Any) -> Any:
    return column[part].null


def _equal(values: npt.NDArray[Any], wanted: int, part: Any) -> Any:
    return values[part] == wanted


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
        if any_true(null):
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
