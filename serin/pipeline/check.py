"""Compares a spec with its tables before anything is built, and reports all problems at once."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from serin.errors import ColumnMissing, SpecError
from serin.formats.cluster.replicas import no_autoscaler, place_without_autoscaler
from serin.formats.schema import ONLINE, InputColumn, difference, read_schema
from serin.formats.serving.journal import NOT_PROMISED
from serin.machine.packages import entered
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.spec.kind_settings import unused_in
from serin.spec.load import absolute_tables, load_spec, spec_file
from serin.spec.monitoring import weeks_problem
from serin.spec.pipeline import PipelineSpec
from serin.spec.serving import ReplicaRange
from serin.spec.steps.parse import parse_step
from serin.spec.stored import stored_capture
from serin.spec.target import TargetSpec
from serin.spec.yaml_file import read_mapping
from serin.store.store import Store

if TYPE_CHECKING:
    from serin.etl.binding.problems import Problems
    from serin.etl.sources.tables import Table
    from serin.etl.trial import Trial

_QUERIED_ROWS = 1000  # of a SQL query: enough to know its columns
_MAKES_NO_NAMES = {
    "target", "time", "id", "split", "checks", "training_only", "allow_leaks", "where", "unique",
}  # fmt: skip
_MOST_ENTRIES = 200  # that are left out of a spec with mistakes

Location = tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckedSpec:
    """A spec that fits its tables. `inputs`: what clients of the served model send for each row. `lookups`: columns
    that the model looks up itself, with the key and the table. `windows`: columns that the gateway adds. `trial`: which
    rows were read. `unlike_live`: how its clients must differ from those of the live version."""

    spec: PipelineSpec
    inputs: tuple[InputColumn, ...] = ()
    lookups: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = ()
    windows: tuple[str, ...] = ()
    trial: Trial | None = None
    unlike_live: str = ""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        spec = self.spec
        if not spec.has_data:
            yield f"{spec.name} is good: a {spec.model.kind} that defines its own inputs, {spec.model.task}"
            yield from (*_environment_lines(spec), *_monitoring_lines(spec))
            return
        yield f"{spec.name} is good: {spec.data.target.task}, feature groups: {len(spec.features)}"
        yield "clients of the served model will send"
        for column in self.inputs:
            also = "".join(f' or "{text}"' for text in column.null_texts)
            yield f"  {column.name:<20} {column.kind:<10} {column.dtype:<6} null: {column.null}{also}"
        for columns, key, table in self.lookups:
            yield f"looked up inside the model, by {', '.join(key)}: {', '.join(columns)} (from {table})"
        if self.windows:
            yield f"added by the gateway, from earlier events: {', '.join(self.windows)}"
        if self.trial is not None:
            yield from _read_lines(self.trial)
            if self.trial.future is not None:
                yield f"warning: {self.trial.future}"
            if self.trial.unscaled and spec.model.needs_scaled_numbers:
                yield f"warning: {self.trial.unscaled}"
        if self.unlike_live:
            yield self.unlike_live
        yield f"rollouts: rollout.false_rollback ({spec.rollout.false_rollback:g}) is {NOT_PROMISED}"
        yield from (*_environment_lines(spec), *_monitoring_lines(spec))


def _environment_lines(spec: PipelineSpec) -> Iterator[str]:
    """What was added for the user's code here, or which workers have it."""
    now = entered()
    if spec.environment is None or now is None:
        return
    if spec.environment.image is not None:
        yield "environment.image: only workers on Kubernetes take it, others refuse the run"
    else:
        added = ", ".join(now.packages) or "nothing, everything is installed here"
        yield f"environment: beside what is installed here, your code has {added}"


def _monitoring_lines(spec: PipelineSpec) -> Iterator[str]:
    """What the spec asks for and will not get by itself: drift of columns whose values are not recorded, and retraining
    by alarms that nothing in Serin raises for this spec."""
    capture, drift, quality = spec.monitoring.capture, spec.monitoring.drift, spec.monitoring.quality
    if drift is not None and drift.columns is None and (hidden := [*capture.mask, *capture.drop]):
        names = ", ".join(dict.fromkeys(hidden))
        yield f"drift of {names} is not watched: monitoring.capture does not record their values"
    for trigger, watched in (("drift", drift), ("quality", quality)):
        if trigger in spec.monitoring.retrain and watched is None:
            yield (
                f"monitoring.retrain: {trigger} waits for events `serin.{trigger}` from outside: without "
                f"monitoring.{trigger} Serin raises no such alarm"
            )


def _check_shadow(spec: PipelineSpec, problems: Problems) -> None:
    """The rollout is refused when it is to begin with recorded requests that the live version does not have."""
    store = Store.open()
    live = store.aliases(spec.name).get("live") if spec.rollout.has_shadow else None
    if live is None:
        return
    problem = stored_capture(Path(store.bundle(spec.name, live).path)).not_replayable()
    if problem:
        text = f"shadow replays recorded requests of live version {live}: {problem} for this rollout"
        problems.add(SpecError(where=spec.name, problems=[("rollout.steps", text)]))


def _check_replicas(spec: PipelineSpec, problems: Problems) -> None:
    """The rollout is refused where no autoscaler runs releases."""
    wanted = spec.serving.replicas
    if not isinstance(wanted, ReplicaRange):
        return
    place = place_without_autoscaler(Store.open())
    if place is not None:
        problem = ("serving.replicas", f"{wanted}: {no_autoscaler(place)}")
        problems.add(SpecError(where=spec.name, problems=[problem]))


def _read_lines(trial: Trial) -> Iterator[str]:
    """What the check does not know, because it did not read it."""
    if trial.rows < trial.total:
        yield f"checked on {trial.rows:,} of {trial.total:,} rows; `serin etl` checks all of them"
    for table in trial.unread:
        yield f"{table} is large: whether its join keys are unique is checked by `serin etl`"


def check_spec(source: PipelineSpec | Mapping[str, Any] | Path) -> CheckedSpec:
    """What the served model will ask of its clients. SpecError lists all that is wrong with the spec, by itself and
    compared with its tables."""
    source = spec_file(source) if isinstance(source, Path) else source
    try:
        spec = load_spec(source)
    except SpecError as error:
        assert not isinstance(source, PipelineSpec)
        raise _with_table_problems(error, source) from None
    from serin.etl.binding.problems import Problems

    problems = Problems()
    _check_own_files(spec, problems)
    _check_shadow(spec, problems)
    _check_replicas(spec, problems)
    checked = _check_data(spec, problems) if spec.has_data else CheckedSpec(spec=spec)
    if problems:
        where = str(source) if isinstance(source, Path) else spec.name
        raise SpecError(where=where, problems=problems.lines())
    return checked


def check_alone(path: Path) -> PipelineSpec:
    """The spec, checked without its tables, a store or a server. SpecError lists all that is wrong with it and which of
    its own files are missing."""
    from serin.etl.binding.problems import Problems

    spec, problems = load_spec(path), Problems()
    _check_own_files(spec, problems)
    if problems:
        raise SpecError(where=str(spec_file(path)), problems=problems.lines())
    return spec


def _check_data(spec: PipelineSpec, problems: Problems) -> CheckedSpec:
    from serin.etl.binding.layout import try_lay_out
    from serin.etl.trial import try_rows

    with _opened(spec.data, problems) as tables:
        laid = try_lay_out(spec.data, spec.features, tables, problems)
        trial = try_rows(spec.data, spec.features, laid, tables, problems)
    _check_weeks(spec, trial, problems)
    layout = laid.layout
    if layout is None:
        return CheckedSpec(spec=spec)
    lookups = tuple(
        (tuple(join.columns.values()), join.spec.here, join.spec.table) for join in layout.lookups
    )
    unlike = _unlike_live(spec, layout.inputs)
    online, inputs = layout.online, layout.inputs
    return CheckedSpec(
        spec=spec,
        inputs=inputs if online is None else online.sent(inputs),
        lookups=lookups,
        windows=() if online is None else tuple(online.made),
        trial=trial,
        unlike_live=unlike,
    )


def _check_weeks(spec: PipelineSpec, trial: Trial, problems: Problems) -> None:
    """Drift needs weeks of training rows to take a tolerance from."""
    drift = spec.monitoring.drift
    if drift is None or drift.tolerance is not None or trial.training_s is None:
        return
    problem = weeks_problem(int(trial.training_s // (7 * 86_400)))
    if problem is not None:
        problems.add(SpecError(where=spec.name, problems=[problem]))


def _unlike_live(spec: PipelineSpec, inputs: Sequence[InputColumn]) -> str:
    """A sentence about columns that clients of the live version do not send as this spec asks for them."""
    store = Store.open()
    live = store.aliases(spec.name).get("live")
    if live is None:
        return ""
    schema = read_schema(Path(store.bundle(spec.name, live).path))
    reason = difference(schema, replace(schema, inputs=tuple(inputs)))
    if not reason:
        return ""
    rule = "" if spec.rollout.shares[0] == 100 else "; set rollout.steps: [100], or give it another name"
    if _online(schema.inputs) != _online(inputs):
        rule = "; online windows change once the model is retired (docs/how-to/online-windows.md)"
    return f"clients of live version {live} must change: {reason}{rule}"


def _online(inputs: Sequence[InputColumn]) -> dict[str, str | None]:
    return {column.name: column.window for column in inputs if column.source == ONLINE}


def _with_table_problems(error: SpecError, source: Mapping[str, Any] | Path) -> SpecError:
    """The error with what the readable part of the spec shows beside it."""
    from serin.etl.binding.layout import try_lay_out
    from serin.etl.binding.problems import Problems
    from serin.etl.trial import try_rows

    problems = Problems()
    problems.add(error)
    try:
        part = _read_partial(source)
    except SpecError:  # the file holds no spec at all
        return error
    if part is None:
        return error
    for problem in part.problems():
        problems.add(SpecError(where="spec", problems=[problem]))
    found = Problems()
    with _opened(part.data, found) as tables:
        laid = try_lay_out(part.data, part.features, tables, found)
        readable = replace(laid, layout=None)  # a spec with mistakes is not computed with
        try_rows(part.data, part.features, readable, tables, found)
    if not part.names_known:
        found.forget(lambda each: isinstance(each, ColumnMissing) and each.table == part.data.main)
    problems.include(found)
    return SpecError(where=error.fields["where"], problems=problems.lines())


def _check_own_files(spec: PipelineSpec, problems: Problems) -> None:
    def look(key: str, path: str) -> str:
        if "://" not in path and not Path(path).is_file():
            problem = f"no file at {path}; put it there or correct the path (relative to the spec's file)"
            problems.add(SpecError(where=spec.name, problems=[(f"model.{key}", problem)]))
        return path

    spec.model.located(look)


@contextmanager
def _opened(data: DataSpec, problems: Problems) -> Iterator[dict[str, Table]]:
    """The tables that can be opened. A conversion is kept for the build that follows."""
    from serin.etl.sources.file_cache import FileCache
    from serin.etl.sources.find import find_table
    from serin.etl.sources.tables import open_table

    with Store.open().using_kept() as kept, tempfile.TemporaryDirectory(prefix="serin-check-") as scratch:
        converted = FileCache(kept)
        tables = {}
        for name, table in data.tables.items():
            with problems.catching(f"data.tables.{name}"):
                rows = Path(scratch) / "sql"
                found = find_table(name, table, converted.digests, rows=rows, most_rows=_QUERIED_ROWS)
                tables[name] = open_table(name, found, Path(scratch), converted)
        yield tables


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartialSpec:
    """What can be read of a spec with mistakes: its data and features without the entries that are wrong, so that one
    mistake does not hide the others. `names_known`: False when an entry that makes columns could not be read: a column
    may only seem to be missing."""

    data: DataSpec
    features: tuple[FeatureSpec, ...]
    names_known: bool
    unused: tuple[tuple[str, str], ...] = ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """What does not fit together in these sections, and settings that the model's kind does not use."""
        yield from self.unused
        if self.names_known:
            yield from self.data.problems()
            spec = PipelineSpec.model_construct(name="partial", data=self.data, features=self.features)
            yield from spec.feature_problems()


def _read_partial(source: Path | Mapping[str, Any]) -> _PartialSpec | None:
    """The readable part of a spec; None when there are no tables to compare it with."""
    base = Path.cwd() if isinstance(source, Mapping) else source.absolute().parent
    raw = source if isinstance(source, Mapping) else read_mapping(source)
    given = raw.get("data")
    if not isinstance(given, dict) or not isinstance(given.get("tables"), dict):
        return None
    data, removed = _readable_data(copy.deepcopy(given))
    if data is None:
        return None
    features = raw.get("features")
    return _PartialSpec(
        data=absolute_tables(data, base),
        features=tuple(_readable_feature(each) for each in (features if isinstance(features, list) else ())),
        names_known=all(location[0] in _MAKES_NO_NAMES for location in removed),
        unused=tuple(unused_in(raw)),
    )


def _readable_data(raw: dict[str, Any]) -> tuple[DataSpec | None, list[Location]]:
    removed: list[Location] = []
    for _ in range(_MOST_ENTRIES):
        raw.setdefault("target", TargetSpec.model_construct(expressions={}, expression="", task="regression"))
        try:
            return DataSpec.model_validate(raw), removed
        except ValidationError as error:
            location = _remove(raw, error.errors()[0]["loc"])
            if location is None:
                break
            removed.append(location)
    return None, removed


def _remove(raw: dict[str, Any], location: Location) -> Location | None:
    """Removes the innermost entry that an error is about; from a list also what follows, so that positions stay true.
    Where it was; None when it is not there."""
    path: list[Any] = [raw]
    for part in location:
        inner = path[-1]
        known = (isinstance(inner, dict) and part in inner) or (
            isinstance(inner, list) and part in range(len(inner))
        )
        if not known:
            break
        path.append(inner[part])
    if len(path) == 1:
        return None
    last, place = path[-2], location[len(path) - 2]
    if isinstance(last, list):
        del last[int(place) :]
    else:
        del last[place]
    return location[: len(path) - 1]


def _readable_feature(raw: Any) -> FeatureSpec:
    """The feature; one without columns when it cannot be read, so that the others keep their positions."""
    try:
        return FeatureSpec.model_validate(raw)
    except ValidationError:
        return FeatureSpec.model_construct(columns=(), steps=(parse_step("normalize"),))
