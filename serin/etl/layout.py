"""Which columns are read from where, and as what: the spec's data and features laid over the tables' real columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from serin.errors import ColumnClash, ColumnMissing, DataError, SpecError
from serin.etl.partitions import Read
from serin.etl.tables import Table
from serin.features.column import kind_of_type
from serin.features.kinds import check_kinds
from serin.formats.schema import DTYPE_OF_KIND, NULL_OF_KIND, InputColumn, Kind
from serin.spec.data import DataSpec, JoinSpec
from serin.spec.features import FeatureSpec
from serin.spec.steps import DateParts


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLayout:
    """`columns`: column there -> name here, only those in use."""

    spec: JoinSpec
    keys: tuple[Read, ...]
    columns: Mapping[str, str]
    reads: tuple[Read, ...]  # the keys, then `columns`


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`kinds`: of every column in use, by its name after the joins. `inputs`: what a client of the model sends."""

    reads: tuple[Read, ...]
    joins: tuple[JoinLayout, ...]
    kinds: Mapping[str, Kind]
    inputs: tuple[InputColumn, ...]
    lookups: tuple[JoinLayout, ...]
    kept: tuple[str, ...]  # what features and requests are made of


def lay_out(data: DataSpec, features: Sequence[FeatureSpec], tables: Mapping[str, Table]) -> Layout:
    """Checks every name and kind the spec uses against the tables; the first DataError or all SpecErrors."""
    main = tables[data.main]
    uses = _uses(data, features)
    made = _joined_names(data, tables)
    for name, user in uses.items():
        if name not in main.types and name not in made:
            raise ColumnMissing(
                column=name, table=main.name, used_by=user, known=[*main.types, *(each for each in made)]
            )
    times = {column for feature in features for column in feature.times} | {data.time}
    kinds = {name: _kind(name, tables, made, data, is_time=name in times) for name in uses}
    check_kinds(features, kinds)
    _check_time(data, kinds)
    exact = set(data.target.columns)
    joins = tuple(_lay_join(join, tables, kinds, uses, exact) for join in data.joins)
    reads = tuple(
        Read(column=name, kind=kind, exact=name in exact) for name, kind in kinds.items() if name not in made
    )
    served = list(dict.fromkeys(column for feature in features for column in feature.served))
    fitted = [column for feature in features for column in feature.inputs]
    inputs = _inputs(data, served, kinds)
    lookups = tuple(
        join for join in joins if join.spec.source == "lookup" and set(join.columns.values()) & set(served)
    )
    kept = tuple(dict.fromkeys([*served, *fitted, *(column.name for column in inputs)]))
    return Layout(reads=reads, joins=joins, kinds=kinds, inputs=inputs, lookups=lookups, kept=kept)


def _uses(data: DataSpec, features: Sequence[FeatureSpec]) -> dict[str, str]:
    """Every column after the joins that anything needs -> the key of the spec that names it first."""
    uses: dict[str, str] = {}
    for index, feature in enumerate(features):
        for column in feature.columns:
            uses.setdefault(column, f"features[{index}].columns")
        for column in feature.inputs:
            uses.setdefault(column, f"features[{index}].steps")
    for column in data.target.columns:
        uses.setdefault(column, "data.target")
    if data.time is not None:
        uses.setdefault(data.time, "data.time")
    for index, check in enumerate(data.checks):
        uses.setdefault(check.column, f"data.checks[{index}]")
    for index, join in enumerate(data.joins):
        for column in join.on:
            uses.setdefault(column, f"data.joins[{index}].on")
    return uses


def _joined_names(data: DataSpec, tables: Mapping[str, Table]) -> dict[str, tuple[str, str]]:
    """Name after the joins -> (table, column there)."""
    made: dict[str, tuple[str, str]] = {}
    main = tables[data.main]
    for index, join in enumerate(data.joins):
        there = tables[join.table].types
        for key in join.on:
            _require(key, there, join.table, f"data.joins[{index}].on")
        for column, name in join.columns.items():
            _require(column, there, join.table, f"data.joins[{index}].columns")
            if name in main.types:
                raise ColumnClash(column=name, tables=(main.name, join.table))
            made[name] = (join.table, column)
    return made


def _require(column: str, known: Iterable[str], table: str, user: str) -> None:
    if column not in known:
        raise ColumnMissing(column=column, table=table, used_by=user, known=known)


def _kind(
    name: str,
    tables: Mapping[str, Table],
    made: Mapping[str, tuple[str, str]],
    data: DataSpec,
    *,
    is_time: bool,
) -> Kind:
    table, column = made.get(name, (data.main, name))
    kind = _kind_in(tables[table], column)
    if kind == "string" and (is_time or _joins_a_time(name, tables, data)):
        return "timestamp"
    return kind


def _kind_in(table: Table, column: str) -> Kind:
    arrow: pa.DataType = table.types[column]
    kind = kind_of_type(arrow)
    if kind is None:
        raise DataError(
            f"table {table.name!r}: column {column!r} has type {arrow}, which nothing can be made of; store it "
            "as a number, a text, a bool or a timestamp, or leave it out",
            table=table.name,
            column=column,
        )
    return kind


def _joins_a_time(name: str, tables: Mapping[str, Table], data: DataSpec) -> bool:
    """Text that is compared with a time in a join is a time."""
    return any(name in join.on and _kind_in(tables[join.table], name) == "timestamp" for join in data.joins)


def _lay_join(
    join: JoinSpec,
    tables: Mapping[str, Table],
    kinds: Mapping[str, Kind],
    uses: Mapping[str, str],
    exact: set[str],
) -> JoinLayout:
    table = tables[join.table]
    keys = []
    for key in join.on:
        there, here = _kind_in(table, key), kinds[key]
        if there == "string" and here == "timestamp":
            there = "timestamp"
        if there != here or here == "float":
            raise DataError(
                f"join with {join.table!r}: key {key!r} is a {here} in the main table and a {there} in {join.table!r}; "
                "store it in both as integers, text or timestamps",
                table=join.table,
                column=key,
            )
        keys.append(Read(column=key, kind=here))
    columns = {column: name for column, name in join.columns.items() if name in uses}
    reads = {read.column: read for read in keys}
    for column, name in columns.items():
        reads.setdefault(column, Read(column=column, kind=kinds[name], exact=name in exact))
    return JoinLayout(spec=join, keys=tuple(keys), columns=columns, reads=tuple(reads.values()))


def _inputs(data: DataSpec, served: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[InputColumn, ...]:
    """The columns a request carries: features that come with it, and the keys of lookups in use."""
    names: dict[str, None] = {}
    for column in served:
        if data.source_of(column) == "lookup":
            join = next(join for join in data.joins if column in join.columns.values())
            names[join.on[0]] = None
        else:
            names[column] = None
    return tuple(
        InputColumn(
            name=name, dtype=DTYPE_OF_KIND[kinds[name]], kind=kinds[name], null=NULL_OF_KIND[kinds[name]]
        )
        for name in names
    )


def _check_time(data: DataSpec, kinds: Mapping[str, Kind]) -> None:
    if data.time is not None and kinds[data.time] not in ("timestamp", "int"):
        raise SpecError(
            where="data",
            problems=[
                ("data.time", f"{data.time!r} is a {kinds[data.time]}; a time is a timestamp or an integer")
            ],
        )


def _is_date(feature: FeatureSpec) -> bool:
    return any(isinstance(step, DateParts) for step in feature.steps)
