"""Which columns the spec uses, who uses them, and of what kind each is: before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from serin.columns.column import kind_of_type
from serin.columns.derived import Typed, typed
from serin.errors import ColumnClash, ColumnMissing, ColumnUnusable, SpecError, TargetUnusable
from serin.etl.binding.problems import Problems, Undetermined
from serin.etl.sources.tables import Table
from serin.expressions import ExpressionError, parse
from serin.formats.schema import Kind
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.spec.relation import JoinSpec, WindowColumn

Made = Mapping[str, tuple[str, str]]  # name after the joins -> (table, column there)


def find_uses(
    data: DataSpec, features: Sequence[FeatureSpec], tables: Mapping[str, Table], problems: Problems
) -> tuple[dict[str, str], Made]:
    """Every column that anything needs -> the key of the spec that names it first; and what the joins make.

    `tables` may lack some that could not be opened: nothing is said about their columns."""
    made = _joined_names(data, tables, problems)
    uses = _uses(data, features)
    if data.main not in tables:
        return uses, made
    main = tables[data.main]
    windows = [name for window in data.windows for name in window.make]
    for key, names in (("derived", data.derived), ("windows", windows)):
        for name in names:
            if name in main.types:
                problem = f"{main.name!r} has a column {name!r} already; rename the new one"
                problems.add(SpecError(where="data", problems=[(f"data.{key}.{name}", problem)]))
    known = [*main.types, *made, *data.derived, *windows]
    for name, user in [*uses.items(), *((name, "data.allow_leaks") for name in data.allow_leaks)]:
        _require(name, known, main, user, problems)
    return uses, made


def _uses(data: DataSpec, features: Sequence[FeatureSpec]) -> dict[str, str]:
    uses: dict[str, str] = {}

    def add(user: str, *columns: str | None) -> None:
        for column in columns:
            if column is not None:
                uses.setdefault(column, user)

    def add_derived() -> None:
        for name in reversed(data.derived):  # a derived column reads only columns defined before it
            if name in uses:
                add(f"data.derived.{name}", *data.reads(name))

    for index, feature in enumerate(features):
        add(f"features[{index}].columns", *feature.columns)
        add(f"features[{index}].steps", *feature.inputs)
    add("data.target", *data.target.columns)
    for key, named in _named(data):
        add(key, named)
    add_derived()
    for index, window in enumerate(data.windows):
        for name, column in window.columns.items():
            if name in uses:
                add(f"data.windows[{index}]", *window.by, column.column)
    add_derived()  # those that windows read
    return uses


def _named(data: DataSpec) -> Iterator[tuple[str, str | None]]:
    """The columns that keys of the data section name by themselves."""
    yield from (("data.time", data.time), ("data.id", data.id), ("data.split.group", data.split.group))
    yield from (("data.where", column) for column in (parse(data.where).columns if data.where else ()))
    yield from (("data.unique.by", column) for column in (data.unique.by if data.unique else ()))
    if data.events is not None:
        yield from (("data.events.id", data.events.id), ("data.events.arrival", data.events.arrival))
    yield from ((f"data.checks[{index}]", check.column) for index, check in enumerate(data.checks))
    for index, join in enumerate(data.joins):
        yield from ((f"data.joins[{index}].on", column) for column in join.here)
        yield f"data.joins[{index}].as_of", join.as_of.column if join.as_of else None


def _joined_names(
    data: DataSpec, tables: Mapping[str, Table], problems: Problems
) -> dict[str, tuple[str, str]]:
    made: dict[str, tuple[str, str]] = {}
    main = tables.get(data.main)
    for index, join in enumerate(data.joins):
        key = f"data.joins[{index}]"
        made |= {name: (join.table, column) for column, name in join.columns.items()}
        for name in join.columns.values():
            if main is not None and name in main.types:
                problems.add(ColumnClash(column=name, tables=(main.name, join.table)), f"{key}.columns")
        if join.table not in tables:
            continue
        there = tables[join.table]
        for column in join.there:
            _require(column, there.types, there, f"{key}.on", problems, _mapping(join, there))
        if join.as_of is not None:
            _require(join.as_of.partner, there.types, there, f"{key}.as_of", problems)
        for column in join.columns:
            _require(column, there.types, there, f"{key}.columns", problems)
    return made


def _require(
    column: str, known: Iterable[str], table: Table, user: str, problems: Problems, advice: str | None = None
) -> None:
    if column not in known:
        renamed = next((new for new, old in table.stored.items() if old == column), None)
        if renamed is not None:
            advice = f"data.rename calls it {renamed!r}"
        problems.add(ColumnMissing(column=column, table=table.name, used_by=user, known=known, advice=advice))


def _mapping(join: JoinSpec, table: Table) -> str | None:
    """The keys of a join as a mapping, when they are a list of names that the joined table lacks."""
    if isinstance(join.on, dict) or all(key in table.types for key in join.on):
        return None
    pairs = [
        (key, key if key in table.types else next(iter(get_close_matches(key, table.types, 1)), "name there"))
        for key in join.on
    ]
    text = ", ".join(f"{here}: {there}" for here, there in pairs)
    return f"where the tables have different names, write on: {{{text}}}"


def text_target(expression: str, task: str) -> TargetUnusable:
    return TargetUnusable(
        expression=expression,
        reason=f"is text; for task {task} compare it (column == 'yes'), or use task: multiclass",
    )


def kind_in(table: Table, column: str) -> Kind:
    """The kind of a table's column; DataError when nothing can be made of its type."""
    arrow: pa.DataType = table.types[column]
    kind = kind_of_type(arrow)
    if kind is None:
        raise ColumnUnusable(
            column=column,
            problem=f"table {table.name!r}: column {column!r} has type {arrow}, which nothing can be made of; store "
            "it as a number, a text, a bool or a timestamp, or leave it out",
        )
    return kind


class Kinds:
    """The kinds of all columns in use; text that is used as a time, or joined with one, is a time. Undetermined for a
    column that is not there."""

    def __init__(
        self, data: DataSpec, features: Sequence[FeatureSpec], tables: Mapping[str, Table], made: Made
    ) -> None:
        self._data = data
        self._tables = tables
        self._made = made
        self._windows = {
            name: (index, column)
            for index, window in enumerate(data.windows)
            for name, column in window.columns.items()
        }
        self._times: set[Any] = {column for feature in features for column in feature.times} | {data.time}
        self._times |= {join.as_of.column for join in data.joins if join.as_of}
        self._times |= {data.events.arrival} if data.events else set()
        self._found: dict[str, Kind] = {}

    def __getitem__(self, name: str) -> Kind:
        if name not in self._found:
            self._found[name] = self._kind(name)
        return self._found[name]

    def typed(self, key: str, text: str) -> Typed:
        """The expression over the columns; SpecError with `key` when they do not fit it."""
        try:
            return typed(text, {name: self[name] for name in parse(text).columns})
        except ExpressionError as error:
            problem = (key, f"{text!r}: {error}")
            raise SpecError(where="data does not fit the tables", problems=[problem]) from error

    def check_target(self, text: str) -> None:
        """TargetUnusable when this expression of the target cannot be computed, or its task cannot learn its kind."""
        try:
            found = typed(text, {name: self[name] for name in parse(text).columns}).kind
        except ExpressionError as error:
            raise TargetUnusable(expression=text, reason=f"cannot be computed: {error}") from error
        if found == "string" and self._data.target.task != "multiclass":
            raise text_target(text, self._data.target.task)

    def _kind(self, name: str) -> Kind:
        data = self._data
        if name in data.derived:
            return self.typed(f"data.derived.{name}", data.derived[name]).kind
        if name in self._windows:
            index, column = self._windows[name]
            try:
                return _window_kind(column, None if column.column is None else self[column.column])
            except ValueError as error:
                problem = (f"data.windows[{index}].make.{name}", str(error))
                raise SpecError(where="data does not fit the tables", problems=[problem]) from error
        table, column_there = self._made.get(name, (data.main, name))
        if table not in self._tables or column_there not in self._tables[table].types:
            raise Undetermined
        kind = kind_in(self._tables[table], column_there)
        return "timestamp" if kind == "string" and self._is_time(name) else kind

    def _is_time(self, name: str) -> bool:
        return name in self._times or any(
            here == name and there in table.types and kind_in(table, there) == "timestamp"
            for join in self._data.joins
            if (table := self._tables.get(join.table)) is not None
            for here, there in zip(join.here, join.there, strict=True)
        )


def _window_kind(column: WindowColumn, kind: Kind | None) -> Kind:
    """What a window makes of a column of this kind; ValueError when it can make nothing of it."""
    if column.function == "count":
        return "int"
    assert kind is not None
    if column.function != "lag" and kind == "string":
        raise ValueError(f"{column.function} needs numbers, and {column.column!r} is text; use lag or count")
    if column.function in ("sum", "mean") and kind == "timestamp":
        raise ValueError(f"{column.function} of a time means nothing; use min, max or lag")
    if column.function == "mean":
        return "float"
    if column.function == "sum":
        return "float" if kind == "float" else "int"
    return kind
