"""What is read from where, and as what: the spec's data and features laid over the tables' real columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from serin.columns.derived import Typed
from serin.errors import ColumnUnusable, SpecError, nearest
from serin.etl.binding.problems import Problems, Undetermined
from serin.etl.binding.uses import Kinds, Made, find_uses, kind_in
from serin.etl.sources.malformed import odd_text
from serin.etl.sources.tables import Read, Table
from serin.formats.schema import DTYPE_OF_KIND, NULL_OF_KIND, ONLINE, InputColumn, Kind
from serin.formats.windows import OnlineColumn, OnlineWindow, WindowPlan
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.spec.relation import JoinSpec, WindowSpec
from serin.spec.steps.step import NUMBERS, TIMES, VALUES, FeatureStep


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
    online: WindowPlan | None = None  # the windows that are computed while the model is served


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
    with problems.catching():
        _check_kinds(_with_known_columns(features, kinds), kinds, tables.get(data.main))
    _check_keys(data, kinds, problems)
    _check_rows(data, features, kinds, problems)
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
    main = tables.get(data.main)
    reads = tuple(
        main.read(name, kind, exact=name in data.answers)
        for name, kind in kinds.items()
        if main is not None and name in main.types
    )
    if problems or main is None:
        return LaidOut(reads=reads, joins=joins)
    tables_of = {name: (data.main, name) for name in main.types} | dict(made)
    inputs, windows = _inputs(data, served, kinds, tables_of), _windows_in_use(data, uses)
    layout = Layout(
        reads=reads,
        joins=joins,
        derived=derived,
        where=where,
        windows=windows,
        kinds=kinds,
        inputs=inputs,
        lookups=tuple(j for j in joins if j.spec.source == "lookup" and set(j.columns.values()) & behind),
        served=served,
        kept=_kept(served, features, inputs),
        sent=_sent(data, kinds),
        online=_online(data, windows, kinds, inputs, tables_of),
    )
    return LaidOut(reads=reads, joins=joins, layout=layout)


def _sent(data: DataSpec, kinds: Mapping[str, Kind]) -> tuple[str, ...]:
    """Floats that clients send although the target reads them as they are stored, and windows over such columns."""
    made = [name for window in data.windows for name in window.make if name not in data.answers]
    return tuple(name for name in (*data.target.known_at_serving, *made) if kinds.get(name) == "float")


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
            joins.append(lay_join(index, join, tables[join.table], kinds, uses, data.answers))
    return tuple(joins)


def lay_join(
    index: int,
    join: JoinSpec,
    table: Table,
    kinds: Mapping[str, Kind],
    uses: Mapping[str, str],
    exact: Collection[str],
) -> JoinLayout:
    """What a join reads from its table. `kinds`: of its columns by their names here; `uses`: the names in use;
    `exact`: those that keep the precision of their files."""
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


def _kept(
    served: Sequence[str], features: Sequence[FeatureSpec], inputs: Sequence[InputColumn]
) -> tuple[str, ...]:
    fitted = (column for feature in features for column in feature.inputs)
    return tuple(dict.fromkeys([*served, *fitted, *(column.name for column in inputs)]))


def _windows_in_use(data: DataSpec, uses: Mapping[str, str]) -> tuple[WindowSpec, ...]:
    return tuple(_in_use(window, uses) for window in data.windows if set(window.make) & set(uses))


def _in_use(window: WindowSpec, uses: Mapping[str, str]) -> WindowSpec:
    make = {name: call for name, call in window.make.items() if name in uses}
    return window.model_copy(update={"make": make})


def _inputs(
    data: DataSpec, served: Sequence[str], kinds: Mapping[str, Kind], made: Made
) -> tuple[InputColumn, ...]:
    """The columns a request carries: features that come with it, keys of lookups, what derived columns read. `made`:
    where the columns of tables come from."""
    names = dict.fromkeys(name for column in served for name in data.request_columns(column))
    return tuple(_input(data, name, kinds[name], made) for name in names)


def _input(data: DataSpec, name: str, kind: Kind, made: Made) -> InputColumn:
    online = data.source_of(name) == ONLINE
    return InputColumn(
        name=name,
        dtype=DTYPE_OF_KIND[kind],
        kind=kind,
        source=ONLINE if online else "request",
        window=_definition(data, name) if online else None,
        null=NULL_OF_KIND[kind],
        null_texts=data.null_texts(*made[name]) if kind == "string" and name in made else (),
    )


def _definition(data: DataSpec, name: str) -> str:
    """What decides the values of an online window, in words."""
    window, events = next(each for each in data.windows if name in each.make), data.events
    assert events is not None, "the spec is refused without"
    return (
        f"{window.make[name]} by {', '.join(window.by)} over {window.span:g} s of {data.time}, "
        f"delay {window.delay:g} s, events by {events.id}, late {events.max_late:g} s, future {events.max_future:g} s"
    )


def _online(
    data: DataSpec,
    windows: Sequence[WindowSpec],
    kinds: Mapping[str, Kind],
    inputs: Sequence[InputColumn],
    made: Made,
) -> WindowPlan | None:
    """How windows with `source: online` that the model reads are computed while it is served."""
    asked = {column.name for column in inputs}
    found = [_online_window(window, kinds, asked) for window in windows if window.source == "online"]
    found = [window for window in found if window.columns]
    if not found or data.events is None or data.time is None:
        return None
    read = (name for window in found for name in (*window.by, *window.reads))
    names = dict.fromkeys((data.time, data.events.id, *read))
    return WindowPlan(
        time=data.time,
        id=data.events.id,
        max_late_us=round(data.events.max_late * 1_000_000),
        max_future_us=round(data.events.max_future * 1_000_000),
        unavailable=data.events.unavailable,
        inputs=tuple(_input(data, name, kinds[name], made) for name in names),
        dropped=tuple(name for name in names if name not in asked),
        windows=tuple(found),
    )


def _online_window(window: WindowSpec, kinds: Mapping[str, Kind], asked: Collection[str]) -> OnlineWindow:
    assert window.span is not None, "the spec refuses others"
    return OnlineWindow(
        by=window.by,
        span_us=round(window.span * 1_000_000),
        delay_us=round(window.delay * 1_000_000),
        columns={
            name: OnlineColumn(function=each.function, column=each.column, back=each.back, kind=kinds[name])
            for name, each in window.columns.items()
            if name in asked
        },
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


def _with_known_columns(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind]) -> list[FeatureSpec]:
    """The features, each with the columns whose kinds are known; its place stays the same."""
    known = []
    for feature in features:
        columns = tuple(column for column in feature.columns if column in kinds)
        extra = set(feature.inputs) - set(feature.columns)
        known.append(feature.model_copy(update={"columns": columns if extra <= kinds.keys() else ()}))
    return known


def _check_kinds(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind], main: Table | None) -> None:
    """Raises SpecError, with the value that makes a column a string, where there is one."""
    try:
        check_kinds(features, kinds)
    except SpecError as error:
        if main is None:
            raise
        named = dict.fromkeys(column for feature in features for column in feature.columns)
        texts = [name for name in named if kinds[name] == "string" and name in main.types]
        files = dict.fromkeys(group.file for group in main.groups)
        stored = {name: main.name_in_file(name) for name in texts}
        reasons = {
            name: next(filter(None, (odd_text(file, stored[name]) for file in files)), None) for name in texts
        }
        problems = [(f"column {name!r}", why) for name, why in reasons.items() if why]
        raise SpecError(
            where="features do not fit the tables", problems=[*error.fields["problems"], *problems]
        ) from error


def _check_rows(
    data: DataSpec, features: Sequence[FeatureSpec], kinds: Mapping[str, Kind], problems: Problems
) -> None:
    """Checks fit the kinds of their columns. Statistics are kept of what features are made of, and of no times: nothing
    else can be compared with the dataset before."""
    kept = {column for feature in features for column in feature.columns}
    for index, check in enumerate(data.checks):
        if check.column is None or check.column not in kinds:
            continue
        kind = kinds[check.column]
        found = list(check.misfits(kind))
        if check.compares and (check.column not in kept or kind == "timestamp"):
            found.append(
                f"{check.column!r} is not a feature (or is a time), so there are no statistics to compare"
            )
        for text in found:
            problems.add(SpecError(where="data", problems=[(f"data.checks[{index}]", text)]))


def _check_keys(data: DataSpec, kinds: Mapping[str, Kind], problems: Problems) -> None:
    """Checks that times are timestamps and keys are not floats."""
    found = []
    time = kinds.get(data.time) if data.time is not None else None
    if time is not None and time not in ("timestamp", "int"):
        found.append(("data.time", f"{data.time!r} is a {time}; a time is a timestamp or an integer"))
    elif time == "int":
        spans = [(f"data.windows[{index}]", w.span or w.delay) for index, w in enumerate(data.windows)]
        for key, span in [*spans, ("data.split.gap", data.split.gap)]:
            if span:
                text = f"{data.time!r} counts in no unit of time; store it as a timestamp, or use rows"
                found.append((key, text))
    keys = [("data.id", data.id), ("data.split.group", data.split.group)]
    if data.events is not None:
        keys.append(("data.events.id", data.events.id))
        found += _event_problems(data, data.events.arrival, kinds)
    keys += [("data.unique.by", column) for column in (data.unique.by if data.unique else ())]
    for index, window in enumerate(data.windows):
        keys += [(f"data.windows[{index}].by", column) for column in window.by]
    for key, column in keys:
        if column is not None and kinds.get(column) == "float":
            found.append(
                (key, f"{column!r} is a float, which cannot be a key; store it as integers or strings")
            )
    for problem in found:
        problems.add(SpecError(where="data does not fit the tables", problems=[problem]))


def _event_problems(
    data: DataSpec, arrival: str | None, kinds: Mapping[str, Kind]
) -> Iterator[tuple[str, str]]:
    """What kinds of columns cannot be a part of an event."""
    if arrival is not None and kinds.get(arrival, "timestamp") != "timestamp":
        yield "data.events.arrival", f"{arrival!r} is a {kinds[arrival]}; store it as a timestamp"
    for index, window in enumerate(data.windows):
        for name, each in window.columns.items():
            if window.source == "online" and each.column is not None and kinds.get(each.column) == "string":
                problem = f"source: online keeps numbers, booleans and times, and {each.column!r} is text; use count()"
                yield f"data.windows[{index}].make.{name}", problem


def check_kinds(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind]) -> None:
    """Raises SpecError with every feature whose steps cannot work on its column's kind."""
    problems = []
    for index, feature in enumerate(features):
        for column in feature.columns:
            text = _misfit(feature.steps[0], kinds[column])
            if text:
                problems.append((f"features[{index}]", f"column {column!r} is a {kinds[column]}: {text}"))
        for step in feature.steps if feature.columns else ():
            problems += [(f"features[{index}]", text) for text in step.misfits(feature.columns, kinds)]
    if problems:
        raise SpecError(where="features do not fit the tables", problems=problems)


def _misfit(step: FeatureStep, kind: Kind) -> str | None:
    accepted = step.accepted()
    if kind in accepted:
        return step.misfit(kind)
    if set(accepted) == set(TIMES):
        return f"{step.label} needs a time; store the column as a timestamp"
    if kind == "timestamp":
        if set(NUMBERS) <= set(accepted):
            return f"{step.label} needs a number; use date_parts or cyclical"
        return f"take its date_parts instead of {step.label}"
    if set(accepted) == set(VALUES):
        return f"{step.label} needs strings or integers; store it as integers or strings, or bucketize it"
    advice = "categorify gives null a separate code" if step.fills else "use categorify"
    return f"{step.label} needs a number; {advice}, or store the column as numbers"
