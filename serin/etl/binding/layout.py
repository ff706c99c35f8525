"""What is read from where, and as what: the spec's data and features laid over the tables' real columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from serin.columns.derived import Typed
from serin.errors import ColumnUnusable, SpecError, nearest
from serin.etl.binding.kind_checks import check_all_kinds
from serin.etl.binding.problems import Problems, Undetermined
from serin.etl.binding.uses import Kinds, Made, find_uses, kind_in
from serin.etl.sources.partitions import Read
from serin.etl.sources.tables import Table
from serin.formats.schema import DTYPE_OF_KIND, NULL_OF_KIND, InputColumn, Kind
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.spec.relation import JoinSpec, WindowSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLayout:
    """`columns`: column there -> name here, only those in use. `time`: what an as-of join goes by, there."""

    spec: JoinSpec
    keys: tuple[Read, ...]
    time: Read | None
    columns: Mapping[str, str]
    reads: tuple[Read, ...]  # the keys, the time, then `columns`


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedLayout:
    """`late`: it reads windows. `served`: features are made of it, so that the model calculates it too."""

    name: str
    text: str
    expression: Typed
    exact: bool
    late: bool
    served: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`kinds`: of every column in use, by its name after the joins. `inputs`: what a client of the model sends."""

    reads: tuple[Read, ...]
    joins: tuple[JoinLayout, ...]
    derived: tuple[DerivedLayout, ...]
    where: Typed | None
    windows: tuple[WindowSpec, ...]  # with only what is in use
    kinds: Mapping[str, Kind]
    inputs: tuple[InputColumn, ...]
    lookups: tuple[JoinLayout, ...]
    served: tuple[str, ...]  # what features are made of
    kept: tuple[str, ...]  # what features and requests are made of
    sent: tuple[str, ...] = ()  # floats that may be stored with more bits than a request holds


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """What can be read although there are problems: columns of the main table and joins. `layout`: None when there are
    any."""

    reads: tuple[Read, ...]
    joins: tuple[JoinLayout, ...]
    layout: Layout | None = None


def lay_out(data: DataSpec, features: Sequence[FeatureSpec], tables: Mapping[str, Table]) -> Layout:
    """Checks every name and kind the spec uses against the tables; one problem is raised as it is, several as one
    SpecError."""
    problems = Problems()
    laid = try_lay_out(data, features, tables, problems)
    problems.raise_found("the spec does not fit the tables")
    assert laid.layout is not None
    return laid.layout


def try_lay_out(
    data: DataSpec, features: Sequence[FeatureSpec], tables: Mapping[str, Table], problems: Problems
) -> LaidOut:
    """Collects all problems. `tables` may lack some that could not be opened."""
    tables = renamed_tables(data.rename, tables, problems)
    uses, made = find_uses(data, features, tables, problems)
    known = Kinds(data, features, tables, made)
    kinds: dict[str, Kind] = {}
    for name in uses:
        with problems.catching(uses[name]):
            kinds[name] = known[name]
    check_all_kinds(data, features, kinds, tables.get(data.main), problems)
    for text in data.target.each.values():
        with problems.catching():
            known.check_target(text)
    joins = _lay_joins(data, tables, kinds, uses, problems)
    served = tuple(dict.fromkeys(column for feature in features for column in feature.served))
    behind = data.made_of(served)
    derived = _lay_derived(data, [name for name in data.derived if name in uses], known, behind, problems)
    where = None
    with problems.catching():
        where = None if data.where is None else known.typed("data.where", data.where)
    reads = _reads(data, kinds, tables[data.main]) if data.main in tables else ()
    if problems:
        return LaidOut(reads=reads, joins=joins)
    fitted = [column for feature in features for column in feature.inputs]
    inputs = _inputs(
        data, served, kinds, {**{name: (data.main, name) for name in tables[data.main].types}, **made}
    )
    layout = Layout(
        reads=reads,
        joins=joins,
        derived=derived,
        where=where,
        windows=tuple(_in_use(window, uses) for window in data.windows if set(window.make) & set(uses)),
        kinds=kinds,
        inputs=inputs,
        lookups=tuple(j for j in joins if j.spec.source == "lookup" and set(j.columns.values()) & behind),
        served=served,
        kept=tuple(dict.fromkeys([*served, *fitted, *(column.name for column in inputs)])),
        sent=_sent(data, kinds),
    )
    return LaidOut(reads=reads, joins=joins, layout=layout)


def _sent(data: DataSpec, kinds: Mapping[str, Kind]) -> tuple[str, ...]:
    """Floats that clients send although the target reads them as they are stored, and windows over such columns."""
    made = [name for window in data.windows for name in window.make if name not in data.answers]
    return tuple(name for name in (*data.target.known_at_serving, *made) if kinds.get(name) == "float")


def _reads(data: DataSpec, kinds: Mapping[str, Kind], main: Table) -> tuple[Read, ...]:
    return tuple(
        main.read(name, kind, exact=name in data.answers)
        for name, kind in kinds.items()
        if name in main.types
    )


def _lay_joins(
    data: DataSpec,
    tables: Mapping[str, Table],
    kinds: Mapping[str, Kind],
    uses: Mapping[str, str],
    problems: Problems,
) -> tuple[JoinLayout, ...]:
    joins = []
    for index, join in enumerate(data.joins):
        with problems.catching(f"data.joins[{index}].on"):
            if join.table not in tables:
                raise Undetermined
            joins.append(_lay_join(index, join, tables[join.table], kinds, uses, data.answers))
    return tuple(joins)


def _lay_join(
    index: int,
    join: JoinSpec,
    table: Table,
    kinds: Mapping[str, Kind],
    uses: Mapping[str, str],
    exact: Collection[str],
) -> JoinLayout:
    keys = [_lay_key(table, there, here, kinds) for here, there in zip(join.here, join.there, strict=True)]
    time = None
    if join.as_of is not None:
        time = _lay_key(table, join.as_of.partner, join.as_of.column, kinds)
        if time.kind not in ("timestamp", "int"):
            problem = f"{time.column!r} is a {time.kind}; a time or an integer is needed"
            raise SpecError(where="data", problems=[(f"data.joins[{index}].as_of", problem)])
    columns = {column: name for column, name in join.columns.items() if name in uses}
    reads = {read.column: read for read in (*keys, *([time] if time else []))}
    for column, name in columns.items():
        if name not in kinds:
            raise Undetermined
        reads.setdefault(column, table.read(column, kinds[name], exact=name in exact))
    return JoinLayout(spec=join, keys=tuple(keys), time=time, columns=columns, reads=tuple(reads.values()))


def _lay_key(table: Table, there: str, here: str, kinds: Mapping[str, Kind]) -> Read:
    if there not in table.types or here not in kinds:
        raise Undetermined
    found, wanted = kind_in(table, there), kinds[here]
    if found == "string" and wanted == "timestamp":
        found = "timestamp"
    if found != wanted or wanted == "float":
        raise ColumnUnusable(
            column=here,
            problem=f"join with {table.name!r}: key {here!r} is a {wanted} in the main table, and {there!r} is a "
            f"{found} in {table.name!r}; store both as integers, text or timestamps",
        )
    return table.read(there, wanted)


def _lay_derived(
    data: DataSpec, names: Sequence[str], known: Kinds, behind: Collection[str], problems: Problems
) -> tuple[DerivedLayout, ...]:
    made = []
    for name in names:
        key, text = f"data.derived.{name}", data.derived[name]
        with problems.catching():
            expression = known.typed(key, text)
            if name in behind and not expression.servable:
                why = (
                    f"{text!r} goes by the order of texts, which no served model can; compare with == or `in`"
                )
                problem = f"is a feature, but {why}, or use it in training only"
                raise SpecError(where="data", problems=[(key, problem)])
            made.append(
                DerivedLayout(
                    name=name,
                    text=text,
                    expression=expression,
                    exact=name in data.answers,
                    late=name in data.late,
                    served=name in behind,
                )
            )
    return tuple(made)


def _in_use(window: WindowSpec, uses: Mapping[str, str]) -> WindowSpec:
    make = {name: call for name, call in window.make.items() if name in uses}
    return window.model_copy(update={"make": make})


def _inputs(
    data: DataSpec, served: Sequence[str], kinds: Mapping[str, Kind], made: Made
) -> tuple[InputColumn, ...]:
    """The columns a request carries: features that come with it, keys of lookups, what derived columns read. `made`:
    where the columns of tables come from."""
    names = dict.fromkeys(name for column in served for name in data.request_columns(column))
    return tuple(
        InputColumn(
            name=name,
            dtype=DTYPE_OF_KIND[kinds[name]],
            kind=kinds[name],
            null=NULL_OF_KIND[kinds[name]],
            null_texts=data.null_texts(*made[name]) if kinds[name] == "string" and name in made else (),
        )
        for name in names
    )


def renamed_tables(
    rename: Mapping[str, Mapping[str, str]], tables: Mapping[str, Table], problems: Problems
) -> Mapping[str, Table]:
    """The tables under the spec's names. A name that does not fit the files is a problem; its table is left out, since
    nothing more can be said about its columns."""
    found = {}
    for name, table in tables.items():
        names = rename.get(name, {})
        wrong = list(_misfits(table, names))
        if wrong:
            problems.add(SpecError(where="data does not fit the tables", problems=wrong))
        else:
            found[name] = _renamed(table, names)
    return found


def _misfits(table: Table, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for old, new in names.items():
        key = f"data.rename.{table.name}.{old}"
        if old not in table.types:
            yield key, f"no column {old!r} in {table.name!r}{nearest(old, table.types)}"
        elif new in table.types:
            yield key, f"{table.name!r} has a column {new!r} already; choose another name"


def _renamed(table: Table, names: Mapping[str, str]) -> Table:
    if not names:
        return table
    types = {names.get(name, name): arrow for name, arrow in table.types.items()}
    return replace(table, types=types, stored={new: old for old, new in names.items()})
