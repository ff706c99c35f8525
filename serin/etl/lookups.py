"""Reads the tables of a model's lookups again, as a build of its dataset does, and computes golden rows with them.

Only the tables of lookups are opened: no row of the main table is read, and no feature is fitted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serin.columns.column import column_from_arrow, kind_of_type
from serin.errors import LookupRefused, TableTooLarge
from serin.etl.binding.layout import JoinLayout, lay_join, renamed_tables
from serin.etl.binding.problems import Problems
from serin.etl.binding.uses import kind_in
from serin.etl.dataset.golden import ARROW, Made, features_of_requests, rows_in_wire_form
from serin.etl.dataset.seal import write_lookup
from serin.etl.engines.memory_budget import available_bytes, partner_bytes
from serin.etl.relational.checks import count_checks, judge_checks
from serin.etl.relational.relation import load_join
from serin.etl.sources.find import find_table
from serin.etl.sources.tables import Table, open_table, refuse_changed
from serin.features.plan import FeaturePlan
from serin.formats.dataset import LookupDescription
from serin.formats.lookups import Lookups
from serin.formats.schema import InputColumn, Kind
from serin.spec.data import DataSpec
from serin.spec.relation import JoinSpec

_MEMORY_SHARE = (
    8  # of what is free, a table may take the eighth part: measured by benchmarks.scale.lookup_refresh
)
_GRAPH_BYTES = 1_900_000_000  # of a table in a graph, which ends at 2 GB
_ADVICE = "a lookup travels inside the model, whole: name fewer columns, or use source: request"
_NEW_KEYS = 16  # of each table: keys whose columns have changed, asked for in further golden rows
_READABLE = {("int", "float"), ("string", "timestamp")}  # kinds found, and kinds that they can be read as


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshedTable:
    """A table as it is now. `joined`: its join in the spec."""

    description: LookupDescription
    table: pa.Table
    before: pa.Table
    joined: JoinSpec


def read_tables_again(
    data: DataSpec, known: Lookups, bundle: Path, folder: Path
) -> tuple[Lookups, list[RefreshedTable]]:
    """Reads every table of `known`, the lookups of the version in `bundle`, and writes it to `folder` as a build does.

    Raises LookupRefused for columns that are gone or have another type, CheckFailed where a check of the spec does not
    hold, and JoinNotManyToOne for a key that occurs twice.
    """
    began, found, scratch = time.time(), [], folder / "scratch"
    scratch.mkdir()
    for description in known.tables:
        before = pq.read_table(bundle / description.file)
        join = _join_of(data, description)
        found.append(_read_again(data, join, description, before, folder, scratch))
    lookups = replace(
        known,
        read=began,
        tables=tuple(each.description for each in found),
        rows={each.description.name: each.table.num_rows for each in found},
    )
    return lookups, found


def check_row_changes(
    tables: Sequence[RefreshedTable], live: Mapping[str, int], *, max_row_change: float | None = None
) -> None:
    """Raises LookupRefused for a table with far more or fewer rows than the live edition's. `max_row_change`: instead
    of the joins' own."""
    for each in tables:
        allowed = each.joined.settings.max_row_change if max_row_change is None else max_row_change
        rows = each.table.num_rows
        before = max(live[each.description.name], 1)
        if allowed is not None and abs(rows - before) / before > allowed:
            reason = (
                f"it has {rows:,} rows, {before:,} before, and max_row_change is {allowed:g}; if that is right, "
                "refresh with a larger --max-row-change"
            )
            raise LookupRefused(table=each.description.name, reason=reason)


def golden_again(
    golden: Path,
    inputs: Sequence[InputColumn],
    plan: FeaturePlan,
    lookups: Lookups,
    tables: Sequence[RefreshedTable],
) -> pa.Table:
    """The golden rows of a version with the features that the new tables give, and further ones that ask for keys whose
    columns have changed. `golden`: the file of a bundle."""
    rows = pq.read_table(golden, columns=[*(column.name for column in inputs), "target", "row"])
    for each in tables:
        rows = pa.concat_tables([rows, _asking_for(_changed_keys(each), each.description.key, rows, inputs)])
    made = Made(
        lookups=[(each.description, each.table) for each in tables],
        derived=lookups.derived,
    )
    columns, num, cat = features_of_requests(inputs, plan, made, rows)
    found = rows_in_wire_form(inputs, plan, columns, num, cat)
    for name in ("target", "row"):
        found = found.append_column(name, rows.column(name))
    return found.combine_chunks()


def _join_of(data: DataSpec, description: LookupDescription) -> JoinSpec:
    for join in data.joins:
        served = join.source == "lookup" and join.table == description.name
        if (
            served
            and join.here == (description.key,)
            and set(description.columns) <= {*join.columns.values()}
        ):
            return join
    raise LookupRefused(table=description.name, reason="the spec of the version has no such lookup")


def _read_again(
    data: DataSpec,
    join: JoinSpec,
    description: LookupDescription,
    before: pa.Table,
    folder: Path,
    scratch: Path,
) -> RefreshedTable:
    name, source = description.name, data.tables[description.name]
    rows = scratch / "sql"
    rows.mkdir(exist_ok=True)
    files = find_table(name, source, scratch / "digests", rows=rows)
    problems = Problems()
    tables = renamed_tables(data.rename, {name: open_table(name, files, scratch)}, problems)
    problems.raise_found("the spec does not fit the table")
    kinds = {column: _kind(before, column) for column in before.column_names}
    _check_schema(tables[name], join, description, kinds)
    layout = lay_join(0, join, tables[name], kinds, dict.fromkeys(description.columns, ""), data.answers)
    _check_memory(layout, tables[name])
    loaded = load_join(layout, tables[name])
    assert loaded.index is not None, "a lookup is not an as-of join"
    columns = {description.key: loaded.index.keys[0], **loaded.columns}
    checks = [check for check in data.checks if check.column in columns]
    judge_checks(checks, [count_checks(columns, np.arange(tables[name].rows), checks)])
    refuse_changed(files, find_table(name, source, scratch / "digests", rows=rows))
    written, table = write_lookup(loaded, kinds, folder)
    if table.nbytes > _GRAPH_BYTES:
        raise TableTooLarge(table=name, needed=table.nbytes, room=_GRAPH_BYTES, advice=_ADVICE)
    return RefreshedTable(description=written, table=table, before=before, joined=join)


def _check_schema(
    table: Table, join: JoinSpec, description: LookupDescription, kinds: Mapping[str, Kind]
) -> None:
    """Raises LookupRefused unless every column is there and can be read as what it was at export."""
    here = {there: name for there, name in join.columns.items() if name in description.columns}
    for there, name in {join.there[0]: description.key, **here}.items():
        if there not in table.types:
            raise LookupRefused(table=table.name, reason=f"column {there!r} is missing")
        found, wanted = kind_in(table, there), kinds[name]
        if found != wanted and (found, wanted) not in _READABLE:
            reason = f"column {there!r} is of type {found}; it was {wanted} when the version was exported"
            raise LookupRefused(table=table.name, reason=reason)


def _check_memory(layout: JoinLayout, table: Table) -> None:
    needed, budget = partner_bytes(layout, table), available_bytes() // _MEMORY_SHARE
    if needed > budget:
        raise TableTooLarge(table=table.name, needed=needed, room=budget, advice=_ADVICE)


def _kind(table: pa.Table, column: str) -> Kind:
    kind = kind_of_type(table.schema.field(column).type)
    assert kind is not None, "it was written from such a column"
    return kind


def _changed_keys(refreshed: RefreshedTable) -> pa.Array:
    """Some keys whose columns differ from before, new ones among them, and some that are gone."""
    key, now, before = refreshed.description.key, refreshed.table, refreshed.before
    keys, old_keys = _plain(now, key), _plain(before, key)
    places = pc.index_in(keys, value_set=old_keys)
    different = np.zeros(now.num_rows, bool)
    for name in refreshed.description.columns:
        different |= ~_same(_plain(now, name), _plain(before, name).take(places))
    lost = ~np.asarray(pc.is_in(old_keys, value_set=keys))
    some = [
        values.take(pa.array(_spread(np.flatnonzero(chosen))))
        for values, chosen in ((keys, different), (old_keys, lost))
    ]
    return pa.concat_arrays(some)


def _plain(table: pa.Table, name: str) -> pa.Array:
    """A column of a lookup's file, strings without a dictionary."""
    values = table.column(name).combine_chunks()
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _same(left: pa.Array, right: pa.Array) -> npt.NDArray[np.bool_]:
    both_null = pc.and_(left.is_null(), right.is_null())
    return np.asarray(pc.or_(pc.equal(left, right).fill_null(False), both_null))


def _spread(places: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Some of the places, from all over."""
    return places[:: max(1, -(-len(places) // _NEW_KEYS))]


def _asking_for(keys: pa.Array, key: str, rows: pa.Table, inputs: Sequence[InputColumn]) -> pa.Table:
    """Requests like the first golden rows, each with one of the keys."""
    (column,) = (each for each in inputs if each.name == key)
    copies = rows.take(pa.array([index % rows.num_rows for index in range(len(keys))], pa.int64()))
    wire = column_from_arrow(keys, column.kind).to_wire()
    values = pa.array(wire, ARROW[column.kind], from_pandas=False)
    return copies.set_column(copies.column_names.index(key), copies.schema.field(key), values)
