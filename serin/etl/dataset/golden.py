"""Golden rows: a few hundred requests with their expected features, chosen for what tends to go wrong.

Most are rows of the test split: nulls, unseen values, extremes, every class, then others by a hash of the row id. Some
are such rows with one value removed or replaced by an unseen one. Their features are computed as in serving, from the
request through the lookups; for a real row the result must equal the ETL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.columns.column import Column, column_from_arrow, column_from_wire
from serin.columns.derived import derive, typed
from serin.columns.lookup import lookup
from serin.columns.rounding import alike
from serin.etl.dataset.candidates import ARROW, MOST_ROWS, Candidates, rows_in_wire_form
from serin.features.plan import FeaturePlan
from serin.formats.dataset import DerivedDescription, LookupDescription
from serin.formats.nulls import null_of
from serin.formats.schema import InputColumn, Kind

_CHANGED_ROWS = 64
_UNSEEN_TEXT, _UNSEEN_INT = "serin-unseen-välue-鳥", 9_007_199_254_740_993


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
    _assert_served_alike(inputs, plan, made, real)
    changed = _changed(inputs, plan, made, real)
    return pa.concat_tables([real, changed]).combine_chunks()


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


def _changed(
    inputs: Sequence[InputColumn],
    plan: FeaturePlan,
    made: Made,
    real: pa.Table,
) -> pa.Table:
    """Copies of real rows, each with one value null, one value unseen, or every value null."""
    nulls = {column.name: _null(column) for column in inputs}
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
    columns, num, cat = features_of_requests(inputs, plan, made, pa.table(requests))
    table = rows_in_wire_form(inputs, plan, columns, num, cat)
    return table.append_column("target", copies.column("target")).append_column("row", copies.column("row"))


def _assert_served_alike(
    inputs: Sequence[InputColumn],
    plan: FeaturePlan,
    made: Made,
    real: pa.Table,
) -> None:
    _, num, cat = features_of_requests(inputs, plan, made, real)
    approximate = plan.approximate
    for index, name in enumerate(plan.numeric):
        wanted = real.column(f"num__{name}").to_numpy()
        found = np.ascontiguousarray(num[:, index])
        if name in approximate:
            same = alike(found, wanted, approximate[name])
        else:
            same = found.view(np.int32) == wanted.view(np.int32)
        assert same.all(), f"{name}: served otherwise"
    for index, output in enumerate(plan.categorical):
        wanted = real.column(f"cat__{output.name}").to_numpy()
        assert np.array_equal(cat[:, index], wanted), f"{output.name}: served otherwise"


def _null(column: InputColumn) -> str | float | int:
    return "" if column.kind == "string" else null_of(column.kind)
