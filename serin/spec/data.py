"""The section `data`: which tables, how they become one, what is predicted, how rows are split, what must hold.

The order of operations: joins, derived columns, where, unique, windows, derived columns that read windows, checks,
target, split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from serin.errors import nearest
from serin.expressions import parse
from serin.spec.checks import CheckSpec
from serin.spec.relation import EventsSpec, JoinSpec, Source, UniqueSpec, WindowSpec
from serin.spec.section import Section, is_empty
from serin.spec.split import SplitSpec
from serin.spec.tables import FileTable, TableSource
from serin.spec.target import TargetSpec, checked_expression

RESERVED = ("score", "label", "probabilities", "row", "target")
"""Names that answers and golden rows use. No column of a request may have one of them."""
RESERVED_PREFIXES = ("num__", "cat__")
"""What the names of features in golden rows begin with."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
Origin = Source | Literal["derived"]


class DataSpec(Section):
    """The first table is the main one: its rows are the rows of the dataset."""

    tables: dict[str, TableSource] = Field(min_length=1)
    """Table name -> path or URL of a file, a folder or a glob (Parquet, CSV, TSV, JSON lines, Arrow), or a section:
    `path` with options for CSV, `delta` for a Delta table, `sql` for a query. A relative path starts at the spec's
    folder. The first table is the main one."""
    rename: dict[str, dict[str, str]] = Field(default_factory=dict, exclude_if=is_empty)
    """Table -> {name of a column in its files: its name here}, such as `{loans: {score: applicant_score}}`. All other
    keys but the options of a table, the dataset and the clients of the model use the new name. The names `score`,
    `label`, `probabilities`, `row` and `target`, and names that begin with `num__` or `cat__`, are reserved: no column
    of a request may have them."""
    joins: tuple[JoinSpec, ...] = ()
    """The other tables and how their rows are found."""
    derived: dict[str, str] = Field(default_factory=dict)
    """Column name -> expression. An expression may read the columns above it."""
    where: str | None = None
    """An expression. Rows for which it is not true are left out of the dataset."""
    unique: UniqueSpec | None = None
    """Keep one row per key. By default all rows are kept."""
    windows: tuple[WindowSpec, ...] = ()
    """Columns that are computed from earlier rows."""
    events: EventsSpec | None = Field(default=None, exclude_if=is_empty)
    """What makes a row an event. Windows with `source: online` need it."""
    target: TargetSpec
    """What the model predicts."""
    time: str | None = None
    """The column with the time of a row. It makes the split temporal and enables the leak check."""
    id: str | None = None
    """The column that identifies what a row is about. The same value in two splits is reported as a leak."""
    split: SplitSpec = SplitSpec()
    """How rows are divided into train, valid and test."""
    checks: tuple[CheckSpec, ...] = ()
    """What must hold for the rows."""
    training_only: tuple[str, ...] = ()
    """Columns of the main table that are not known when a request is made. They cannot be features."""
    allow_leaks: tuple[str, ...] = ()
    """Columns that the leak check ignores."""

    @field_validator("rename", mode="before", json_schema_input_type=dict[str, dict[str, str]])
    @classmethod
    def _renames_by_table(cls, given: Any, others: ValidationInfo) -> Any:
        return by_table(given, others.data.get("tables", {}))

    @field_validator("where")
    @classmethod
    def _parses(cls, text: str | None) -> str | None:
        return text if text is None else checked_expression(text)

    @field_validator("derived")
    @classmethod
    def _all_parse(cls, derived: dict[str, str]) -> dict[str, str]:
        for text in derived.values():
            checked_expression(text)
        return derived

    @property
    def main(self) -> str:
        return next(iter(self.tables), "")  # none: of a server elsewhere

    def null_texts(self, table: str, column: str) -> tuple[str, ...]:
        """The texts that mean null in a column of a table, besides the empty one."""
        source = self.tables.get(table)
        stored = {new: old for old, new in self.rename.get(table, {}).items()}.get(column, column)
        return source.nulls_of(stored) if isinstance(source, FileTable) else ()

    @property
    def split_kind(self) -> Literal["temporal", "group", "stratified", "random"]:
        if self.split.kind != "auto":
            return self.split.kind
        if self.split.group is not None:
            return "group"
        return "random" if self.time is None else "temporal"

    @property
    def answers(self) -> frozenset[str]:
        """The columns that the target is made of, also through derived ones."""
        return self.made_of(self.target.columns)

    @property
    def hidden_answers(self) -> frozenset[str]:
        """Those of `answers` that nobody knows when a request is made."""
        return self.answers - set(self.target.known_at_serving)

    def made_of(self, columns: Iterable[str]) -> frozenset[str]:
        """The columns, and what the derived ones among them are made of."""
        found, waiting = set[str](), list(columns)
        while waiting:
            column = waiting.pop()
            found.add(column)
            waiting += self.reads(column) if column in self.derived else ()
        return frozenset(found)

    def reads(self, derived: str) -> tuple[str, ...]:
        """The columns that a derived column is made of; of derived ones, those defined before it."""
        names = list(self.derived)
        later = set(names[names.index(derived) :])
        return tuple(name for name in parse(self.derived[derived]).columns if name not in later)

    def source_of(self, column: str) -> Origin:
        """Where `column` comes from at serving time."""
        if column in self.training_only or column in self.hidden_answers:
            return "training_only"
        for join in self.joins:
            if column in join.columns.values():
                return join.source
        for window in self.windows:
            if column in window.make:
                return window.source
        if column in self.derived:
            hidden = any(self.source_of(each) == "training_only" for each in self.reads(column))
            return "training_only" if hidden else "derived"
        return "request"

    def request_columns(self, column: str) -> tuple[str, ...]:
        """What a request must hold so that `column` can be had: itself, a lookup's key, a derived column's inputs."""
        source = self.source_of(column)
        if source == "derived":
            needed = (name for each in self.reads(column) for name in self.request_columns(each))
            return tuple(dict.fromkeys(needed))
        if source == "lookup":
            return (next(join.here[0] for join in self.joins if column in join.columns.values()),)
        return (column,)

    def problems(self) -> Iterator[tuple[str, str]]:
        """What does not fit together inside this section, as (key, problem and how to fix it)."""
        for table in self.tables:
            if not _FILE_NAME.fullmatch(table):
                rule = "letters, digits, '_', '-' and '.', at most 63, not '.' or '-' first: files are called by it"
                yield f"data.tables.{table}", f"{table!r} is not a valid table name: {rule}"
        yield from rename_problems(self.rename, self.tables)
        yield from known_problems(self)
        yield from self._join_problems()
        yield from self._name_problems()
        yield from self._order_problems()
        yield from self._time_problems()
        yield from online_problems(self)

    def _join_problems(self) -> Iterator[tuple[str, str]]:
        seen = {self.main}
        for index, join in enumerate(self.joins):
            key = f"data.joins[{index}]"
            if join.table not in self.tables:
                yield f"{key}.with", f"no table {join.table!r} in data.tables; name it there first"
            elif join.table in seen:
                yield f"{key}.with", f"table {join.table!r} is the main table or joined already"
            seen.add(join.table)
            later = {*self.derived, *(name for window in self.windows for name in window.make)}
            for column in (*join.here, *([join.as_of.column] if join.as_of else [])):
                if column in later:
                    yield f"{key}.on", f"{column!r} is made after the joins; join by columns of the tables"
            if join.source == "lookup" and (source := self.source_of(join.here[0])) != "request":
                yield f"{key}.on", f"{join.here[0]!r} is {source}; a lookup's key must come with the request"
        for table in self.tables:
            if table not in seen:
                yield f"data.tables.{table}", "is never joined; take it out or join it"

    def _name_problems(self) -> Iterator[tuple[str, str]]:
        """Names that are made twice, or used before they are made."""
        made: dict[str, str] = {}
        for index, join in enumerate(self.joins):
            for name in join.columns.values():
                if name in made:
                    text = f"{name!r} comes from {made[name]!r} too; rename it: {{there: here}}"
                    yield f"data.joins[{index}].columns", text
                made[name] = join.table
        for index, window in enumerate(self.windows):
            for name in window.make:
                if name in made:
                    problem = f"{name!r} comes from {made[name]!r} too; rename it"
                    yield f"data.windows[{index}].make.{name}", problem
                made[name] = f"windows[{index}]"
        known: set[str] = set()
        for name, text in self.derived.items():
            if name in made:
                yield f"data.derived.{name}", f"{name!r} comes from {made[name]!r} too; rename it"
            for column in parse(text).columns:
                if column in self.derived and column not in known:
                    problem = f"reads {column!r} before it is made; put {column!r} above it"
                    yield f"data.derived.{name}", problem
            known.add(name)

    def _order_problems(self) -> Iterator[tuple[str, str]]:
        """Columns that are used before windows have made them."""
        early = [("data.where", parse(self.where).columns if self.where else ())]
        early.append(("data.unique.by", self.unique.by if self.unique else ()))
        for index, window in enumerate(self.windows):
            read = [each.column for each in window.columns.values() if each.column is not None]
            early.append((f"data.windows[{index}]", (*window.by, *read)))
        late = self.late
        for key, columns in early:
            for column in columns:
                if column in late:
                    yield (
                        key,
                        f"{column!r} is made by windows, which come later; use columns that are there before",
                    )

    def _time_problems(self) -> Iterator[tuple[str, str]]:
        if self.windows and self.time is None:
            yield "data.windows", "need data.time: a window holds what was before"
        if self.split_kind == "temporal" and self.time is None:
            yield "data.split.kind", "temporal needs data.time"
        if self.split.gap and self.split_kind != "temporal":
            yield "data.split.gap", "needs data.time: it is a time"
        if self.split_kind == "stratified" and self.target.task == "regression":
            yield "data.split.kind", "stratified needs classes; a regression has none: use random or temporal"
        if self.split_kind == "stratified" and self.target.names:
            yield "data.split.kind", "stratified needs one target to go by; use random or temporal"

    @property
    def late(self) -> frozenset[str]:
        """Window columns, and the derived columns that read them."""
        late = {name for window in self.windows for name in window.make}
        for name, text in self.derived.items():
            if late & set(parse(text).columns):
                late.add(name)
        return frozenset(late)


def online_problems(data: DataSpec) -> Iterator[tuple[str, str]]:
    """What keeps windows with `source: online` from being computed while requests are served."""
    online = [(index, window) for index, window in enumerate(data.windows) if window.source == "online"]
    if not online:
        if data.events is not None:
            yield "data.events", "is for windows with source: online, and there are none; take it out"
        return
    if data.events is None:
        yield (
            "data.events",
            "windows with source: online need it; name the column with an event's id: {id: ...}",
        )
    elif data.events.id in (data.events.arrival, data.time):
        yield "data.events.id", "is a time; name the column that tells one event from another"
    for key, given in (("where", data.where), ("unique", data.unique)):
        if given is not None:
            yield (
                f"data.{key}",
                "does not go with windows of source: online: every request is an event; filter the table before",
            )
    named = [("data.time", data.time), ("data.events.id", data.events.id if data.events else None)]
    for index, window in online:
        read = [each.column for each in window.columns.values()]
        named += [(f"data.windows[{index}]", column) for column in (*window.by, *read)]
    for key, column in dict.fromkeys(named):
        if column is not None and (why := _not_of_an_event(data, column)):
            yield (
                key,
                f"{column!r} {why}; source: online reads columns of the main table that come with a request",
            )


def _not_of_an_event(data: DataSpec, column: str) -> str:
    """Why a column cannot be a part of an event; empty when it can."""
    source = data.source_of(column)
    if column in data.answers:
        return "makes the target"
    if source == "request" and not any(column in join.columns.values() for join in data.joins):
        return ""
    return {"training_only": "is not known when a request is made", "derived": "is derived"}.get(
        source, "is joined"
    )


def known_problems(data: DataSpec) -> Iterator[tuple[str, str]]:
    """What is wrong with `data.target.known_at_serving`, as (key, problem and how to fix it)."""
    key = "data.target.known_at_serving"
    known = data.target.known_at_serving
    for name in known:
        if name not in data.answers:
            yield key, f"the target does not read {name!r}; take it out{nearest(name, data.answers)}"
        elif name in data.derived:
            inputs = ", ".join(data.reads(name))
            yield (
                key,
                f"{name!r} is derived; name those of the columns it is made of that clients know: {inputs}",
            )
        elif reason := _said_unknown(data, name):
            yield key, f"{name!r}: {reason}"
    for text in data.target.each.values() if known else ():
        made_of = data.made_of(parse(text).columns) - data.derived.keys()
        if made_of <= set(known):
            yield (
                key,
                f"clients who know all that {text!r} reads know the answer; leave out what they do not know",
            )


def why_unknown(data: DataSpec, column: str) -> str:
    """Why no request can hold a column whose source is `training_only`, and what can be done about it."""
    if column in data.hidden_answers:
        return _why_of_target(data, column)
    if reason := _said_unknown(data, column):
        return f"{column!r} is not known when a request is made: {reason}"
    inner = next(name for name in data.reads(column) if data.source_of(name) == "training_only")
    return f"{column!r} is derived from {inner!r}, and {why_unknown(data, inner)}"


def _why_of_target(data: DataSpec, column: str) -> str:
    text = f"{column!r} makes the target, and a feature that knows the answer is refused: leave it out"
    if column in data.derived:
        return f"{text}, or derive another column from what clients know"
    others = data.answers - data.derived.keys() - {column, *data.target.known_at_serving}
    if not others:
        return text
    known = ", ".join([*data.target.known_at_serving, column])
    return f"{text}, or, when clients know it before the answer, add data.target.known_at_serving: [{known}]"


def _said_unknown(data: DataSpec, column: str) -> str | None:
    """Which key of the spec says that a column is not known, and how to change that."""
    if column in data.training_only:
        return "data.training_only names it; take it out there when clients know it, or leave it out here"
    for index, join in enumerate(data.joins):
        if column in join.columns.values() and join.source == "training_only":
            change = "request when clients send it, or to lookup when the model shall look it up"
            return _set_source(f"data.joins[{index}]", change)
    for index, window in enumerate(data.windows):
        if column in window.make and window.source == "training_only":
            return _set_source(
                f"data.windows[{index}]",
                "request when clients send it, or to online when Serin shall compute it",
            )
    return None


def _set_source(place: str, change: str) -> str:
    return f"{place} has source: training_only; set that to {change}, or leave it out here"


def is_reserved(name: str) -> bool:
    """Whether no column of a request may have this name."""
    return not name or name in RESERVED or name.startswith(RESERVED_PREFIXES)


def by_table(given: Any, tables: Mapping[str, Any]) -> Any:
    """The mapping as it is given; ValueError that shows the right form when the table's name is left out."""
    if isinstance(given, dict) and (flat := {old: new for old, new in given.items() if isinstance(new, str)}):
        table = next(iter(tables), "main")
        names = ", ".join(f"{old}: {new}" for old, new in flat.items())
        raise ValueError(f"names the columns of no table; write rename: {{{table}: {{{names}}}}}")
    return given


def rename_problems(
    rename: Mapping[str, Mapping[str, str]], tables: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """What is wrong whatever columns the files have, as (key, problem and how to fix it)."""
    for table, names in rename.items():
        if table not in tables:
            yield f"data.rename.{table}", f"no table {table!r} in data.tables{nearest(table, tables)}"
            continue
        taken: dict[str, str] = {}
        for old, new in names.items():
            if problem := _rename_problem(old, new, names, taken):
                yield f"data.rename.{table}.{old}", problem
            taken.setdefault(new, old)


def _rename_problem(old: str, new: str, names: Mapping[str, str], taken: Mapping[str, str]) -> str | None:
    if not new:
        return "the new name is empty; choose another"
    if old == new:
        return f"{old!r} is its name already; take it out"
    if new in names:
        return (
            f"{new!r} is renamed itself, and names are not exchanged or passed on; choose a name that no column of "
            f"the table has, such as {new + '_renamed'!r}"
        )
    if new in taken:
        return f"{taken[new]!r} is renamed to {new!r} too; choose another name for one of them"
    if is_reserved(new):
        return f"{new!r} is reserved for answers and golden rows; choose another name"
    return None
