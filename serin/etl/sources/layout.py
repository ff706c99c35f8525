"""What is read from where, and as what: the spec's data and features laid over the tables' real columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from serin.columns.derived import Typed
from serin.errors import ColumnUnusable, SpecError
from serin.etl.sources.odd_texts import odd_text
from serin.etl.sources.partitions import Read
from serin.etl.sources.tables import Table
from serin.etl.sources.uses import Kinds, find_uses, kind_in
from serin.features.kinds import check_kinds
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


def lay_out(data: DataSpec, features: Sequence[FeatureSpec], tables: Mapping[str, Table]) -> Layout:
    """Checks every name and kind the spec uses against the tables; the first DataError or all SpecErrors."""
    uses, made = find_uses(data, features, tables)
    known = Kinds(data, features, tables, made)
    kinds = {name: known[name] for name in uses}
    _check_kinds(features, kinds, tables[data.main])
    _check_keys(data, kinds)
    _check_compared(data, features, kinds)
    joins = tuple(_lay_join(join, tables, kinds, uses, data.answers) for join in data.joins)
    main = tables[data.main].types
    reads = tuple(
        Read(column=name, kind=kind, exact=name in data.answers)
        for name, kind in kinds.items()
        if name in main
    )
    served = tuple(dict.fromkeys(column for feature in features for column in feature.served))
    fitted = [column for feature in features for column in feature.inputs]
    behind = _behind(data, served)
    inputs = _inputs(data, served, kinds)
    return Layout(
        reads=reads,
        joins=joins,
        derived=_lay_derived(data, [name for name in data.derived if name in uses], known, behind),
        where=None if data.where is None else known.typed("data.where", data.where),
        windows=tuple(_in_use(window, uses) for window in data.windows if set(window.make) & set(uses)),
        kinds=kinds,
        inputs=inputs,
        lookups=tuple(j for j in joins if j.spec.source == "lookup" and set(j.columns.values()) & behind),
        served=served,
        kept=tuple(dict.fromkeys([*served, *fitted, *(column.name for column in inputs)])),
    )


def _check_kinds(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind], main: Table) -> None:
    """SpecError, with the value that makes a text of a column, where there is one."""
    try:
        check_kinds(features, kinds)
    except SpecError as error:
        named = dict.fromkeys(column for feature in features for column in feature.columns)
        texts = [name for name in named if kinds[name] == "string" and name in main.types]
        files = dict.fromkeys(group.file for group in main.groups)
        reasons = {name: next(filter(None, (odd_text(file, name) for file in files)), None) for name in texts}
        problems = [(f"column {name!r}", why) for name, why in reasons.items() if why]
        raise SpecError(
            where="features do not fit the tables", problems=[*error.fields["problems"], *problems]
        ) from error


def _lay_join(
    join: JoinSpec,
    tables: Mapping[str, Table],
    kinds: Mapping[str, Kind],
    uses: Mapping[str, str],
    exact: Collection[str],
) -> JoinLayout:
    table = tables[join.table]
    keys = [_lay_key(table, key, key, kinds) for key in join.on]
    time = None
    if join.as_of is not None:
        time = _lay_key(table, join.as_of.partner, join.as_of.column, kinds)
        if time.kind not in ("timestamp", "int"):
            raise SpecError(
                where="data",
                problems=[
                    ("data.joins", f"as_of: {time.column!r} is a {time.kind}; a time or an integer is needed")
                ],
            )
    columns = {column: name for column, name in join.columns.items() if name in uses}
    reads = {read.column: read for read in (*keys, *([time] if time else []))}
    for column, name in columns.items():
        reads.setdefault(column, Read(column=column, kind=kinds[name], exact=name in exact))
    return JoinLayout(spec=join, keys=tuple(keys), time=time, columns=columns, reads=tuple(reads.values()))


def _lay_key(table: Table, there: str, here: str, kinds: Mapping[str, Kind]) -> Read:
    found, wanted = kind_in(table, there), kinds[here]
    if found == "string" and wanted == "timestamp":
        found = "timestamp"
    if found != wanted or wanted == "float":
        raise ColumnUnusable(
            column=here,
            problem=f"join with {table.name!r}: key {here!r} is a {wanted} in the main table and a {found} in "
            f"{table.name!r}; store it in both as integers, text or timestamps",
        )
    return Read(column=there, kind=wanted)


def _lay_derived(
    data: DataSpec, names: Sequence[str], known: Kinds, behind: Collection[str]
) -> tuple[DerivedLayout, ...]:
    made, problems = [], []
    for name in names:
        text = data.derived[name]
        expression = known.typed(f"data.derived.{name}", text)
        if name in behind and not expression.servable:
            why = f"{text!r} goes by the order of texts, which no served model can; compare with == or `in`"
            problems.append((f"data.derived.{name}", f"is a feature, but {why}, or use it in training only"))
        exact, late = name in data.answers, name in data.late
        made.append(
            DerivedLayout(
                name=name, text=text, expression=expression, exact=exact, late=late, served=name in behind
            )
        )
    if problems:
        raise SpecError(where="data", problems=problems)
    return tuple(made)


def _behind(data: DataSpec, served: Iterable[str]) -> set[str]:
    """The served columns, and what the derived ones among them are made of."""
    found, waiting = set[str](), list(served)
    while waiting:
        column = waiting.pop()
        found.add(column)
        waiting += data.reads(column) if column in data.derived else ()
    return found


def _in_use(window: WindowSpec, uses: Mapping[str, str]) -> WindowSpec:
    make = {name: call for name, call in window.make.items() if name in uses}
    return window.model_copy(update={"make": make})


def _inputs(data: DataSpec, served: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[InputColumn, ...]:
    """The columns a request carries: features that come with it, keys of lookups, what derived columns read."""
    names = dict.fromkeys(name for column in served for name in data.request_columns(column))
    return tuple(
        InputColumn(
            name=name, dtype=DTYPE_OF_KIND[kinds[name]], kind=kinds[name], null=NULL_OF_KIND[kinds[name]]
        )
        for name in names
    )


def _check_compared(data: DataSpec, features: Sequence[FeatureSpec], kinds: Mapping[str, Kind]) -> None:
    """Statistics are kept of what features are made of, and of no times: nothing else can be compared."""
    kept = {column for feature in features for column in feature.columns if kinds[column] != "timestamp"}
    problems = [
        (
            f"data.checks[{index}]",
            f"{check.column!r} is no feature (or a time): no statistics of it are kept to compare",
        )
        for index, check in enumerate(data.checks)
        if check.compares and check.column is not None and check.column not in kept
    ]
    if problems:
        raise SpecError(where="data", problems=problems)


def _check_keys(data: DataSpec, kinds: Mapping[str, Kind]) -> None:
    """Times are times, keys are no floats."""
    problems = []
    if data.time is not None and kinds[data.time] not in ("timestamp", "int"):
        problems.append(
            ("data.time", f"{data.time!r} is a {kinds[data.time]}; a time is a timestamp or an integer")
        )
    elif data.time is not None and kinds[data.time] == "int":
        spans = [(f"data.windows[{index}]", w.span or w.delay) for index, w in enumerate(data.windows)]
        for key, span in [*spans, ("data.split.gap", data.split.gap)]:
            if span:
                text = f"{data.time!r} counts in no unit of time; store it as a timestamp, or use rows"
                problems.append((key, text))
    keys = [("data.id", data.id), ("data.split.group", data.split.group)]
    keys += [("data.unique.by", column) for column in (data.unique.by if data.unique else ())]
    for index, window in enumerate(data.windows):
        keys += [(f"data.windows[{index}].by", column) for column in window.by if column in kinds]
    for key, column in keys:
        if column is not None and kinds[column] == "float":
            problems.append((key, f"{column!r} is a float, which is no key; store it as integers or text"))
    if problems:
        raise SpecError(where="data does not fit the tables", problems=problems)
